//! One write to the maps, and what the maps hold, as data.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
};

use ipnet::IpNet;
use traffic_policy_cluster::model::Endpoint;
use traffic_policy_ebpf::abi::{Frontend, ServiceInfo};

use crate::dataplane::maps::keys::{FrontendId, Source};

/// One write.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// Writes endpoints into a range that no program reads yet.
    Slots {
        ipv6: bool,
        base: u32,
        endpoints: Vec<Endpoint>,
    },
    SetFrontend(FrontendId, Frontend),
    DeleteFrontend(FrontendId),
    /// Names the Service port that has an index, in `tp_svc_names`, which `services` reads.
    SetInfo(u32, Box<ServiceInfo>),
    /// Forgets who had an index, and what was counted for it.
    ClearInfo(u32),
    /// Says that an address is a ClusterIP, whatever the port; or no longer.
    ClusterIp(IpAddr, bool),
    /// Says that ClusterIPs are taken from a range; or no longer.
    ServiceCidr(IpNet, bool),
    /// Lets sources of a range use the frontends of a Service port that have [`traffic_policy_ebpf::abi::frontend::SOURCE_RANGES`].
    AddSourceRange(Source),
    RemoveSourceRange(Source),
}

/// Content of the maps of both families.
#[derive(Debug, Default)]
pub struct Held {
    pub frontends: BTreeMap<FrontendId, Frontend>,
    /// Endpoints of each range in use, by family and base.
    pub slots: HashMap<(bool, u32), Vec<Endpoint>>,
    pub sources: BTreeSet<Source>,
    pub names: BTreeMap<u32, ServiceInfo>,
    pub cluster_ips: BTreeSet<IpAddr>,
    pub service_cidrs: BTreeSet<IpNet>,
}
