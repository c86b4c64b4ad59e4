//! Metrics in the Prometheus text format, for `--metrics-address`.
//!
//! There are two kinds of names. `kubeproxy_…` are kube-proxy's own, with its labels (`ip_family`
//! since Kubernetes 1.34), so that dashboards and alerts continue to work. Metrics of another
//! mechanism are left out: `…iptables…`, `…nftables…` and `…conntrack…`. `traffic_policy_…` are
//! this agent's.
//!
//! A scrape never waits for the run loop, since a stuck loop is what metrics must show; and the
//! loop waits for a scrape only while a few numbers are copied. So the loop stores here the values
//! that only it knows, and the counters of the packet path, which no task owns, are read at the
//! moment of the scrape by a file descriptor shared with it. The packet path does nothing.

#![forbid(unsafe_code)]

mod exposition;
mod histogram;
mod labels;
mod node;
mod packets;
mod process;
mod registry;
mod server;
mod syncs;

pub use self::{
    node::{NoLocal, Observed, PortCounts},
    registry::Metrics,
    server::MetricsServer,
};
