//! The Services, clients and endpoints of a run: few, so that their flows interact.

use std::net::{IpAddr, SocketAddr};

use fastrand::Rng;
use traffic_policy_testing::{
    harness::{Device, Frontend, Harness, Setup, Spot},
    lab::Family,
};

/// Port of every endpoint.
pub const TARGET: u16 = 8080;
/// Source ports towards endpoints of other nodes.
pub const SNAT_PORTS: [u16; 6] = [5551, 5552, 5553, 5554, 5555, 5556];
pub const CLIENTS: [Spot; 2] = [Spot::Client, Spot::OtherClient];
/// Ports of clients. The last one is no port, but a packet may have it (RFC 768).
pub const CLIENT_PORTS: [u16; 5] = [40_000, 40_001, 40_002, 40_003, 0];

/// Location of an endpoint, and the path of packets to it and back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub spot: Spot,
    /// The node's device towards it, and the router behind that; `None` if it is on this node.
    pub route: Option<(Device, Spot)>,
}

pub const ENDPOINTS: [Endpoint; 3] = [
    Endpoint { spot: Spot::Near, route: Some((Device::Eth0, Spot::RouterNear)) },
    Endpoint { spot: Spot::Far, route: Some((Device::Eth1, Spot::RouterFar)) },
    Endpoint { spot: Spot::Local, route: None },
];

/// A Service port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Service {
    pub address: Spot,
    pub port: u16,
    /// Whether its policy is Local.
    pub local: bool,
    /// Endpoints as bits that index [`ENDPOINTS`].
    pub endpoints: u8,
    /// Whether its frontend is in the maps.
    pub there: bool,
    /// Whether new flows still go to other nodes under policy Local without an endpoint here.
    pub draining: bool,
    /// Whether only [`ALLOWED`] is served.
    pub ranges: bool,
    /// Whether clients stay with their endpoint for [`AFFINITY`] seconds.
    pub affinity: bool,
}

/// Changes of a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Endpoints(u8),
    Local(bool),
    There(bool),
    Draining(bool),
    Ranges(bool),
    Affinity(bool),
}

/// The source range of a Service that has one.
pub const ALLOWED: Spot = CLIENTS[0];
/// Affinity in seconds, far from any sum of the steps of time.
pub const AFFINITY: u32 = 200;

const PLAIN: Service = Service {
    address: Spot::Node,
    port: 30_080,
    local: false,
    endpoints: 0b111,
    there: true,
    draining: false,
    ranges: false,
    affinity: false,
};

pub const SERVICES: [Service; 4] = [
    PLAIN,
    Service { port: 30_081, local: true, endpoints: 0b110, ..PLAIN },
    // Its port is that of its endpoints: on this node, only the addresses of packets change.
    Service { address: Spot::Vip, port: TARGET, endpoints: 0b001, ..PLAIN },
    Service { port: 30_082, endpoints: 0b000, ..PLAIN },
];

impl Change {
    pub fn random(rng: &mut Rng) -> Self {
        let on = rng.bool();
        match rng.u8(..10) {
            0..=4 => Self::Endpoints(rng.u8(..8)),
            5 => Self::Local(on),
            // Most of the time it exists, and serves every client.
            6 => Self::There(on || rng.bool()),
            7 => Self::Draining(on),
            8 => Self::Ranges(on && rng.bool()),
            _ => Self::Affinity(on),
        }
    }

    /// Changes a Service, and the maps as the agent does.
    pub fn apply(self, service: &mut Service, number: u32, harness: &mut Harness) {
        let was_there = service.there;
        match self {
            Self::Endpoints(endpoints) => service.endpoints = endpoints,
            Self::Local(local) => service.local = local,
            Self::There(there) => service.there = there,
            Self::Draining(draining) => service.draining = draining,
            Self::Ranges(ranges) => service.ranges = ranges,
            Self::Affinity(affinity) => service.affinity = affinity,
        }
        match (was_there, service.there) {
            (_, true) => harness.put(number, &service.frontend()),
            (true, false) => harness.take_away(&service.frontend()),
            (false, false) => {}
        }
        // The agent does the same for slots that are rewritten.
        harness.change_routes(|routes| routes.route = routes.route.wrapping_add(1) & 0xffff | 1);
    }
}

impl Service {
    pub fn frontend(&self) -> Frontend {
        let endpoints: Vec<_> = self.all().map(|endpoint| (endpoint.spot, TARGET)).collect();
        let frontend = Frontend::new(self.address, self.port).endpoints(&endpoints);
        let frontend = if self.local { frontend.local() } else { frontend };
        let frontend = if self.ranges { frontend.sources(&[ALLOWED]) } else { frontend };
        let frontend = if self.affinity { frontend.affinity(AFFINITY) } else { frontend };
        // A drain that ended long ago is equivalent to none.
        frontend.drain_until(if self.draining { u64::MAX } else { 1 })
    }

    /// Whether a client is served.
    pub fn allows(&self, client: IpAddr, family: Family) -> bool {
        !self.ranges || client == ALLOWED.of(family)
    }

    /// Whether new flows from outside only get endpoints of this node.
    pub fn uses_local(&self) -> bool {
        self.local && self.all().any(|endpoint| endpoint.route.is_none())
    }

    fn all(&self) -> impl Iterator<Item = Endpoint> {
        let bits = self.endpoints;
        ENDPOINTS
            .into_iter()
            .enumerate()
            .filter(move |(index, _)| bits >> index & 1 == 1)
            .map(|(_, each)| each)
    }

    /// Returns the endpoints that a new flow from outside may get.
    pub fn candidates(&self) -> Vec<Endpoint> {
        let here = self.local && (!self.draining || self.uses_local());
        self.all().filter(|endpoint| !here || endpoint.route.is_none()).collect()
    }

    pub fn at(&self, family: Family) -> SocketAddr {
        SocketAddr::new(self.address.of(family), self.port)
    }
}

pub fn setup() -> Setup {
    let setup = SERVICES.iter().fold(Setup::default(), |setup, service| setup.and(service.frontend()));
    setup.snat_ports(SNAT_PORTS)
}
