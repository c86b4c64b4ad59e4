//! Layouts of network plugins, each with real agents: both policies from outside, connections from
//! a pod and from a node, path MTU, an agent that is killed under load, and network policies, with
//! both modes of `--local-delivery`. The results are a table in docs/compatibility.md:
//! `UPDATE_DOCS=1 cargo xtask test cni` writes it. Needs root; without it each test fails with an
//! explanation. Without nft and iptables tests are skipped.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod asymmetric;
mod killed;
mod layouts;
mod path_mtu;
mod policies;
mod sockets;
mod table;
mod testbed;
mod veth_peer;
