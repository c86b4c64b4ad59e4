//! `adopt`: hands kube-proxy's connections over to an agent that is already running.

use anyhow::{Context, Result, ensure};
use clap::Args;
use traffic_policy_dataplane::{
    adopt_pinned,
    inspect::{Heartbeat, Presence},
    node::{conntrack, ipvs, kept_nat},
};

use super::view::{self, View};

/// Take over, from conntrack, the connections that kube-proxy has begun, while its rules still
/// exist.
///
/// Does what `run --adopt` does at its start. To be called on a node whose agent was started
/// without it, before `kube-proxy --cleanup`; the running agent follows the connections until they
/// end.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    view: View,
}

impl Arguments {
    pub(super) fn execute(self) -> Result<()> {
        let pinned = self.view.pinned()?;
        let heartbeat = Heartbeat::read(&pinned)?;
        ensure!(
            matches!(Presence::read(&pinned)?, Presence::Running { .. }) && heartbeat.synced().is_some(),
            "no agent runs on these maps, or it has not written them yet: start it with `run --adopt`"
        );
        let connections = conntrack::translated().context(
            "the connections of kube-proxy cannot be read from conntrack (is the module nf_conntrack_netlink there?)",
        )?;
        let adopted = adopt_pinned(pinned.root(), &connections)?;
        let live = adopted.live() + adopted.no_room;
        if live > 0 {
            kept_nat::keep().context("the nftables table that keeps NAT cannot be made")?;
        }
        if self.view.json() {
            return view::print_json(&serde_json::json!({
                "tcp": adopted.tcp,
                "udp": adopted.udp,
                "sctp": adopted.sctp,
                "begun_anew": adopted.begun_anew,
                "clash": adopted.clash,
                "no_room": adopted.no_room,
                "over": adopted.over,
                "others": adopted.others,
            }));
        }
        view::print(|out| {
            writeln!(
                out,
                "adopted {} TCP connections, {} UDP flows and {} SCTP associations of kube-proxy: conntrack translates them until they end",
                adopted.tcp, adopted.udp, adopted.sctp
            )?;
            for reason in adopted.not_adopted().into_iter().chain(ipvs::not_adopted()) {
                writeln!(out, "not adopted: {reason}")?;
            }
            if live > 0 {
                writeln!(out, "kube-proxy's rules may be removed now: `kube-proxy --cleanup`")?;
            }
            Ok(())
        })
    }
}
