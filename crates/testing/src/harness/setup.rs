//! The content of the maps before the first packet.

use traffic_policy_cluster::model::maglev::TableSize;
use traffic_policy_ebpf::abi::{frontend, frontend_kind};

use super::{Device, Spot};

/// A Service port on one address.
#[derive(Clone, Debug)]
pub struct Frontend {
    pub address: Spot,
    pub port: u16,
    pub flags: u32,
    pub cluster: Vec<(Spot, u16)>,
    pub local: Vec<(Spot, u16)>,
    pub drain_until: u64,
    /// Seconds for which a client stays with its endpoint.
    pub affinity: u32,
    /// The slots of the Maglev table of policy Cluster.
    pub maglev: Option<TableSize>,
    /// The former owner of every slot of that table, before it the one before, and so on.
    pub former: Vec<(Spot, u16)>,
    /// The time in nanoseconds of CLOCK_MONOTONIC until which they are asked.
    pub former_until: u64,
    /// Source ranges; if there are any, no other client is served.
    pub sources: Vec<Spot>,
    pub(super) within_udp: bool,
    pub(super) by_mac: bool,
    pub(super) held: bool,
}

impl Frontend {
    /// Makes a frontend for TCP and UDP, with policy Cluster. The node's own address is recognised
    /// as such.
    pub fn new(address: Spot, port: u16) -> Self {
        let flags = if address == Spot::Node { frontend::NODE_ADDRESS } else { 0 };
        Self {
            address,
            port,
            flags,
            cluster: Vec::new(),
            local: Vec::new(),
            drain_until: 0,
            affinity: 0,
            maglev: None,
            former: Vec::new(),
            former_until: u64::MAX,
            sources: Vec::new(),
            within_udp: false,
            by_mac: false,
            held: false,
        }
    }

    /// Sets the endpoints of policy Cluster; those on this node are endpoints of policy Local, too.
    #[must_use]
    pub fn endpoints(mut self, endpoints: &[(Spot, u16)]) -> Self {
        self.cluster = endpoints.to_vec();
        self.local = endpoints.iter().copied().filter(|(spot, _)| *spot == Spot::Local).collect();
        if !endpoints.is_empty() {
            self.flags |= frontend::HAS_ENDPOINTS;
        }
        self
    }

    /// Sets policy Local.
    #[must_use]
    pub fn local(mut self) -> Self {
        self.flags |= frontend::LOCAL;
        self
    }

    /// Makes it a ClusterIP, which the prefilter recognises by its address.
    #[must_use]
    pub fn cluster_ip(mut self) -> Self {
        self.flags |= frontend_kind::CLUSTER_IP << frontend::KIND_SHIFT;
        self
    }

    /// Sets session affinity with a time-out in seconds.
    #[must_use]
    pub fn affinity(mut self, seconds: u32) -> Self {
        self.affinity = seconds;
        self
    }

    /// Chooses the endpoints of policy Cluster by a Maglev table.
    #[must_use]
    pub fn maglev(mut self, size: TableSize) -> Self {
        self.maglev = Some(size);
        self.flags |= frontend::MAGLEV;
        self
    }

    /// Names the former owner of every slot, the one before it, and so on.
    #[must_use]
    pub fn former(mut self, owners: &[(Spot, u16)]) -> Self {
        self.former = owners.to_vec();
        self
    }

    /// Makes it a node port, which is also that of packets to other nodes' addresses that these
    /// have forwarded directly.
    #[must_use]
    pub fn node_port(mut self) -> Self {
        self.flags |= frontend_kind::NODE_PORT << frontend::KIND_SHIFT;
        self
    }

    /// Serves only these sources.
    #[must_use]
    pub fn sources(mut self, sources: &[Spot]) -> Self {
        self.sources = sources.to_vec();
        self.flags |= frontend::SOURCE_RANGES;
        self
    }

    /// Forwards directly to endpoints of other nodes, which open such packets.
    #[must_use]
    pub fn direct(mut self) -> Self {
        self.flags |= frontend::DIRECT;
        self
    }

    /// Forwards directly, within UDP.
    #[must_use]
    pub fn direct_within_udp(mut self) -> Self {
        self.within_udp = true;
        self.direct()
    }

    /// Forwards directly, to the MAC address of the endpoint's node where that takes such packets.
    #[must_use]
    pub fn direct_by_mac(mut self) -> Self {
        self.by_mac = true;
        self.flags |= frontend::L2;
        self.direct()
    }

    /// Forwards directly what goes on alone: the other nodes do not know this one yet.
    #[must_use]
    pub fn held(mut self) -> Self {
        self.held = true;
        self
    }

    /// Is known to this node alone.
    #[must_use]
    pub fn without_l2(mut self) -> Self {
        self.flags &= !frontend::L2;
        self
    }

    /// Forwards directly, and asks for replies through this node.
    #[must_use]
    pub fn tunnel(mut self) -> Self {
        self.flags |= frontend::TUNNEL | frontend::OPENS_REPLIES;
        self.direct()
    }

    pub(super) fn is_direct(&self) -> bool {
        self.flags & frontend::DIRECT != 0
    }

    pub(super) fn is_cluster_ip(&self) -> bool {
        frontend::kind(self.flags) == frontend_kind::CLUSTER_IP
    }

    /// Sets the end of the drain, in nanoseconds of CLOCK_MONOTONIC.
    #[must_use]
    pub fn drain_until(mut self, until: u64) -> Self {
        self.drain_until = until;
        self
    }
}

/// Content of the maps.
#[derive(Clone, Debug)]
pub struct Setup {
    pub frontends: Vec<Frontend>,
    /// Source ports towards endpoints, in the order in which they are tried from a random start.
    pub snat_ports: Vec<u16>,
    pub hop_max_age: u32,
    pub answers_per_jiffy: u32,
    pub seed: u64,
    /// Attached devices, and whether each accepts frames from XDP.
    pub devices: Vec<(Device, bool)>,
    /// ClusterIPs are allocated from the networks (/24, /64) around these addresses.
    pub service_cidrs: Vec<Spot>,
    pub source_check: SourceCheck,
    /// Routes to the networks (/24, /64) around these addresses, with the MTU in bytes that they
    /// name, or 0 for none.
    pub route_mtus: Vec<(Spot, u32)>,
    /// Jiffies per second, as the agent measured them.
    pub hz: u32,
    /// Whether the frontends serve SCTP, as they do TCP and UDP.
    pub sctp: bool,
}

/// The check of sources of new flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceCheck {
    Off,
    Martian,
    Strict,
}

/// Jiffies per second in tests: times are set, not waited for.
pub const HZ: u32 = 100;

/// The only port of the SNAT port range, unless a test sets others: the whole packet is then known
/// beforehand.
pub const SNAT_PORT: u16 = 5555;

impl Default for Setup {
    fn default() -> Self {
        Self {
            frontends: Vec::new(),
            snat_ports: vec![SNAT_PORT],
            hop_max_age: u32::MAX / 2,
            answers_per_jiffy: 100,
            seed: 1,
            devices: vec![(Device::Eth0, true), (Device::Eth1, true), (Device::Slim0, true)],
            service_cidrs: Vec::new(),
            source_check: SourceCheck::Martian,
            route_mtus: Vec::new(),
            hz: HZ,
            sctp: true,
        }
    }
}

impl Setup {
    /// A setup with one frontend.
    pub fn of(frontend: Frontend) -> Self {
        Self::default().and(frontend)
    }

    #[must_use]
    pub fn and(mut self, frontend: Frontend) -> Self {
        self.frontends.push(frontend);
        self
    }

    #[must_use]
    pub fn snat_ports(mut self, ports: impl IntoIterator<Item = u16>) -> Self {
        self.snat_ports = ports.into_iter().collect();
        self
    }

    #[must_use]
    pub fn service_cidr(mut self, around: Spot) -> Self {
        self.service_cidrs.push(around);
        self
    }

    /// Gives the route to the network around `around` an MTU in bytes.
    #[must_use]
    pub fn route_mtu(mut self, around: Spot, mtu: u32) -> Self {
        self.route_mtus.push((around, mtu));
        self
    }

    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}
