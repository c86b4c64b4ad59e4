//! Metrics in the Prometheus text format, for `--metrics-address`.
//!
//! Two kinds of names. `kubeproxy_…` are kube-proxy's own, with its labels (`ip_family` since Kubernetes 1.34), so that
//! dashboards and alerts go on working. Left out is what speaks of another mechanism: `…iptables…`, `…nftables…` and
//! `…conntrack…`. `traffic_policy_…` are this agent's.
//!
//! A scrape never waits for the run loop, for a loop that is stuck is what people look at metrics for; and the loop waits
//! for no scrape but while a few numbers are copied. So the loop leaves word here of what only it knows, and the counters
//! of the packet path, which no task owns, are read at the moment of the scrape by a file descriptor shared with it. The
//! packet path does nothing.

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
    node::{NoLocal, Observed},
    registry::Metrics,
    server::MetricsServer,
};
