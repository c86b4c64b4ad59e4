//! Builders for tests, demo and lab: namespaces and topologies, cluster objects, agents, traffic and its loss.

pub mod lab;
pub mod netlink;
pub mod netns;
pub mod offload;
