//! Builders for tests, demo and lab: namespaces and topologies, cluster objects, agents, traffic and its loss.

pub mod agent;
pub mod capture;
pub mod checksum;
pub mod lab;
pub mod netlink;
pub mod netns;
pub mod object;
pub mod offload;
pub mod ping;
pub mod traffic;
pub mod xdp;
