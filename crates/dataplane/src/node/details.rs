//! The details of a device for `check`: its kind, XDP programs and TC filters.

use anyhow::{Context, Result};
use futures::TryStreamExt;
use netlink_packet_route::{
    link::{LinkAttribute, LinkXdp},
    tc::{TcAttribute, TcFilterBpfOption, TcMessage, TcOption},
};

use super::{
    headers::kind,
    network::{Network, answered},
};

/// The kind and programs of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Details {
    /// The kind: `veth`, `vxlan`, `bridge` …; `None` for a device with a hardware driver.
    pub kind: Option<String>,
    /// The ids of the XDP programs on it, of any mode.
    pub xdp: Vec<u32>,
    /// The filters of its ingress and clsact qdiscs.
    pub filters: Vec<Filter>,
}

/// A TC filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    pub ingress: bool,
    /// The kind of filter: `bpf`, `flower`, `u32` …
    pub kind: String,
    /// The name of its program, for a BPF filter.
    pub program: Option<String>,
    /// The `tcm_info`, with the priority in the upper half.
    pub info: u32,
    pub handle: u32,
}

impl Network {
    /// Reads the details of a device.
    pub async fn details(&self, index: u32) -> Result<Details> {
        answered("looking at a device", self.read_details(index)).await
    }

    async fn read_details(&self, index: u32) -> Result<Details> {
        let mut links = self.handle.link().get().match_index(index).execute();
        let link = links.try_next().await.context("looking at a device failed")?;
        let link = link.with_context(|| format!("device {index} is gone"))?;
        let mut details = Details::default();
        for attribute in &link.attributes {
            match attribute {
                LinkAttribute::LinkInfo(infos) => details.kind = infos.iter().find_map(kind),
                LinkAttribute::Xdp(facts) => {
                    // With programs of several modes, the plain id is 0.
                    let ids = facts.iter().filter_map(|fact| match fact {
                        LinkXdp::ProgId(id)
                        | LinkXdp::DrvProgId(id)
                        | LinkXdp::SkbProgId(id)
                        | LinkXdp::HwProgId(id) => Some(*id).filter(|id| *id != 0),
                        _ => None,
                    });
                    details.xdp = ids.collect();
                    details.xdp.sort_unstable();
                    details.xdp.dedup();
                }
                _ => {}
            }
        }
        let device = i32::try_from(index).context("device number out of range")?;
        for ingress in [true, false] {
            let mut handle = self.handle.traffic_filter(device);
            let request = if ingress { handle.get().ingress() } else { handle.get().egress() };
            let filters: Vec<TcMessage> =
                request.execute().try_collect().await.context("listing TC filters failed")?;
            // The kernel also lists each priority on its own, without a filter.
            let filters = filters.iter().filter(|filter| u32::from(filter.header.handle) != 0);
            details.filters.extend(filters.map(|message| filter(message, ingress)));
        }
        Ok(details)
    }
}

fn filter(message: &TcMessage, ingress: bool) -> Filter {
    let mut filter = Filter {
        ingress,
        kind: String::new(),
        program: None,
        info: message.header.info,
        handle: message.header.handle.into(),
    };
    for attribute in &message.attributes {
        match attribute {
            TcAttribute::Kind(kind) => filter.kind.clone_from(kind),
            TcAttribute::Options(options) => {
                filter.program = options.iter().find_map(|option| match option {
                    TcOption::Bpf(TcFilterBpfOption::ProgName(name)) => Some(name.clone()),
                    _ => None,
                });
            }
            _ => {}
        }
    }
    filter
}
