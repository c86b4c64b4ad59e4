//! A single write to the maps, and the content of the maps, as data.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
};

use ipnet::IpNet;
use traffic_policy_cluster::model::Endpoint;
use traffic_policy_ebpf::abi::{Frontend, ServiceInfo};

use crate::dataplane::maps::keys::{FrontendId, Source};

/// A single write to the maps.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// Writes endpoints into a range that no program reads yet.
    Slots {
        ipv6: bool,
        base: u32,
        endpoints: Vec<Endpoint>,
    },
    /// Writes a Maglev table into elements that no program reads yet.
    Table {
        base: u32,
        elements: Vec<u64>,
    },
    SetFrontend(FrontendId, Frontend),
    DeleteFrontend(FrontendId),
    /// Sets the Service port of an index in `tp_svc_names`, which `services` reads.
    SetInfo(u32, Box<ServiceInfo>),
    /// Clears the Service port of an index, and its counts.
    ClearInfo(u32),
    /// Adds or removes an address as a ClusterIP, whatever the port.
    ClusterIp(IpAddr, bool),
    /// Adds or removes a range that ClusterIPs are allocated from.
    ServiceCidr(IpNet, bool),
    /// Allows sources of a range to use the frontends of a Service port that have
    /// [`traffic_policy_ebpf::abi::frontend::SOURCE_RANGES`].
    AddSourceRange(Source),
    RemoveSourceRange(Source),
}

impl Op {
    /// Whether this write leaves bits set in the prefilter that nothing needs any more. A frontend
    /// that is rewritten because its address came to this node, or left it, does not count although
    /// it needs other bits: the old ones cost some packets a look-up, as they did before.
    pub fn leaves_bits(&self) -> bool {
        matches!(self, Self::DeleteFrontend(_) | Self::ClusterIp(_, false) | Self::ServiceCidr(_, false))
    }
}

/// The content of the maps of both families.
#[derive(Debug, Default)]
pub struct Held {
    pub frontends: BTreeMap<FrontendId, Frontend>,
    /// The endpoints of each range in use, by family and base.
    pub slots: HashMap<(bool, u32), Vec<Endpoint>>,
    pub sources: BTreeSet<Source>,
    pub names: BTreeMap<u32, ServiceInfo>,
    pub cluster_ips: BTreeSet<IpAddr>,
    pub service_cidrs: BTreeSet<IpNet>,
}
