//! The node as the kernel knows it: devices, addresses, routes, neighbours. It is read through
//! netlink only: the process may be in another mount namespace than its network.

mod ask;
pub mod conntrack;
mod details;
mod devices;
pub mod direct_probe;
mod dump;
pub mod ethtool;
mod events;
mod fingerprint;
mod headers;
pub mod ipsec;
pub mod ipvs;
pub mod kept_nat;
mod link;
mod neighbours;
pub mod netlink;
mod network;
pub mod nftables;
pub mod pod_links;
pub mod pod_namespaces;
mod policy_routing;
mod ports;
mod refusal;
mod route_mtus;
mod route_to;
pub mod sctp_divider;
mod sock_diag;
pub mod socket_ender;
pub mod sockets;
pub mod veth;
mod way;

pub use self::{
    ask::{Answer, Asker, Question, Sign},
    details::{Details, Filter},
    devices::{check, left_out, wanted},
    direct_probe::{Answered, ProbeWay},
    events::{Event, Events, Neighbour},
    headers::Header,
    ipvs::Ipvs,
    link::{Address, Link, Route, local},
    neighbours::{NeighbourManager, release},
    network::Network,
    policy_routing::{OtherWay, Ways},
    ports::bound_ports,
    refusal::Refusal,
    route_mtus::RouteMtus,
    route_to::RouteTo,
    way::{HopAddress, ways},
};
