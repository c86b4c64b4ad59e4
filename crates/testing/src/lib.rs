//! Builders for tests, demo and lab: namespaces and topologies, cluster objects, agents, traffic
//! and its loss.
//!
//! ```no_run
//! # use std::net::SocketAddr;
//! # use traffic_policy_testing::agent::Agent;
//! # use traffic_policy_testing::lab::{Family, Lab};
//! # use traffic_policy_testing::object::{Backend, Manifests, Policy, Port, Service};
//! # use traffic_policy_testing::traffic::{Ledger, Outcome, Probe, Server};
//! # fn main() -> anyhow::Result<()> {
//! let lab = Lab::builder().pods(&[1, 2, 0]).build()?;
//! let ledger = Ledger::default();
//! let _servers: Vec<_> = lab.pods().map(|pod| Server::start(pod, 8080, &ledger)).collect::<Result<_, _>>()?;
//!
//! let web = Service::new("web").policy(Policy::Local).port(Port::tcp(80, 8080).node_port(30080));
//! let backends: Vec<_> = lab.pods().map(Backend::of).collect();
//! Manifests::of(&lab)?.apply(&web, &backends)?;
//! let _agents = Agent::start_all(&lab, |agent| agent.attach("xdp"))?;
//!
//! let port_of = |number| SocketAddr::new(lab.node(number).address(Family::V4), 30080);
//! let answer = Probe::tcp(port_of(1)).answer(lab.client().netns())?;
//! assert_eq!(answer.client.ip(), lab.client().address(Family::V4));
//! assert_eq!(Probe::tcp(port_of(3)).from(lab.client().netns())?, Outcome::Silent);
//! # Ok(())
//! # }
//! ```

pub mod agent;
pub mod api_server;
pub mod attached;
pub mod bpf_map;
pub mod browser;
pub mod capture;
pub mod cgroup;
pub mod checksum;
pub mod cluster;
pub mod container;
pub mod control_plane;
pub mod counters;
pub mod explain;
pub mod exposition;
mod family;
pub mod flood;
pub mod harness;
pub mod image;
pub mod impaired;
pub mod kube_proxy;
pub mod kustomize;
pub mod lab;
pub mod logind;
pub mod matrix;
pub mod metadata_server;
pub mod netlink;
pub mod netns;
pub mod network_policy;
pub mod nftables;
pub mod object;
pub mod offload;
pub mod pace;
pub mod packet;
pub mod packet_socket;
pub mod ping;
pub mod pinned;
pub mod plugin;
pub mod real_api_server;
pub mod recording;
mod rows;
pub mod script;
mod skipped;
pub mod state;
pub mod traffic;
pub mod tun;
pub mod wireguard;
pub mod xdp;

pub use self::skipped::skipped;
