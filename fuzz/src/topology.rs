//! The Services, clients and endpoints of a run: few, so that flows meet.

use std::net::SocketAddr;

use traffic_policy_testing::{
    harness::{Device, Frontend, Setup, Spot},
    lab::Family,
};

/// Port of every endpoint.
pub const TARGET: u16 = 8080;
/// Source ports towards endpoints of other nodes.
pub const POOL: [u16; 6] = [5551, 5552, 5553, 5554, 5555, 5556];
pub const CLIENTS: [Spot; 2] = [Spot::Client, Spot::OtherClient];
/// The last one is none, but a packet may have it (RFC 768).
pub const CLIENT_PORTS: [u16; 5] = [40_000, 40_001, 40_002, 40_003, 0];

/// Where an endpoint is, and how packets get there and back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub spot: Spot,
    /// The node's device towards it, and the router behind that; `None`: it is on this node.
    pub way: Option<(Device, Spot)>,
}

pub const ENDPOINTS: [Endpoint; 3] = [
    Endpoint { spot: Spot::Near, way: Some((Device::Eth0, Spot::RouterNear)) },
    Endpoint { spot: Spot::Far, way: Some((Device::Eth1, Spot::RouterFar)) },
    Endpoint { spot: Spot::Local, way: None },
];

/// A Service port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Service {
    pub address: Spot,
    pub port: u16,
    /// Policy Local.
    pub local: bool,
    /// Endpoints as bits: of [`ENDPOINTS`].
    pub endpoints: u8,
}

pub const SERVICES: [Service; 4] = [
    Service { address: Spot::Node, port: 30_080, local: false, endpoints: 0b111 },
    Service { address: Spot::Node, port: 30_081, local: true, endpoints: 0b110 },
    Service { address: Spot::Vip, port: 80, local: false, endpoints: 0b001 },
    Service { address: Spot::Node, port: 30_082, local: false, endpoints: 0b000 },
];

impl Service {
    pub fn frontend(&self) -> Frontend {
        let endpoints: Vec<_> = self.all().map(|endpoint| (endpoint.spot, TARGET)).collect();
        let frontend = Frontend::new(self.address, self.port).endpoints(&endpoints);
        if self.local { frontend.local() } else { frontend }
    }

    fn all(&self) -> impl Iterator<Item = Endpoint> {
        let bits = self.endpoints;
        ENDPOINTS
            .into_iter()
            .enumerate()
            .filter(move |(index, _)| bits >> index & 1 == 1)
            .map(|(_, each)| each)
    }

    /// Those that a new flow from outside may get.
    pub fn candidates(&self) -> Vec<Endpoint> {
        self.all().filter(|endpoint| !self.local || endpoint.way.is_none()).collect()
    }

    pub fn at(&self, family: Family) -> SocketAddr {
        SocketAddr::new(self.address.of(family), self.port)
    }
}

pub fn setup() -> Setup {
    let setup = SERVICES.iter().fold(Setup::default(), |setup, service| setup.and(service.frontend()));
    setup.pool(POOL)
}
