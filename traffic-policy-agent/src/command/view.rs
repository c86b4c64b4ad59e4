//! Common parts of commands that read the pins: the folder of the pins, and the output.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
pub use traffic_policy_cluster::command::view::{
    Output, OutputArguments, frontend_kind, is_named, policy, print, print_json, span, table, usage, wrap,
};
use traffic_policy_dataplane::{DEFAULT_PINS, inspect::Pinned};
use traffic_policy_ebpf::outcome::{Outcome, Verdict};

/// Whether an outcome drops a packet, with or without an answer of the packet path's own.
pub fn is_drop(outcome: Outcome) -> bool {
    match outcome.verdict() {
        Verdict::Drop => true,
        Verdict::Send => ["rejected-", "reset-"].iter().any(|kind| outcome.name().starts_with(kind)),
        Verdict::Pass => false,
    }
}

/// Pin folder and output format.
#[derive(Debug, Args)]
pub struct View {
    /// The folder that `run` was given.
    #[arg(long, env = "TRAFFIC_POLICY_PIN_DIR", default_value = DEFAULT_PINS, value_name = "D")]
    pub pin_dir: PathBuf,
    #[command(flatten)]
    pub output: OutputArguments,
}

impl View {
    pub fn pinned(&self) -> Result<Pinned> {
        Pinned::open(&self.pin_dir)
    }

    pub fn json(&self) -> bool {
        self.output.output == Output::Json
    }
}

#[cfg(test)]
pub mod tests {
    use traffic_policy_cluster::model::{
        Forwarding, FrontendKind, Policy, Protocol, ServiceName, ServicePortKey,
    };
    use traffic_policy_dataplane::inspect::{Choice, FormerTables, FrontendView, Phase, ServicePort};

    /// Returns a Service port of policy Local without an endpoint here.
    pub fn port() -> ServicePort {
        ServicePort {
            key: ServicePortKey {
                service: ServiceName { namespace: "shop".to_owned(), name: "web".to_owned() },
                port: "http".to_owned(),
                protocol: Protocol::Tcp,
                ipv6: false,
            },
            index: 3,
            external_policy: Policy::Local,
            internal_policy: Policy::Cluster,
            frontends: vec![FrontendView {
                address: "172.18.0.13:30080".parse().unwrap(),
                kind: FrontendKind::NodePort,
                policy: Policy::Local,
                phase: Phase::NoLocalEndpoint,
            }],
            cluster: Vec::new(),
            local: Vec::new(),
            affinity: None,
            source_ranges: Vec::new(),
            choice: Choice::Random,
            former: FormerTables::default(),
            forwarding: Forwarding::Snat,
        }
    }
}
