//! `cleanup`: restores the node to its state before the first `run`.

use std::io::ErrorKind;

use anyhow::{Context, Result};
use clap::Args;
use nix::sys::signal::{SigSet, Signal};
use traffic_policy_dataplane::{
    self as dataplane, Removed,
    node::{self, Network, kept_nat},
    veth_peer,
};

use super::view::{self, View};
use crate::check;

/// Detach all programs of this agent and free its maps, of any version. Nothing else is touched.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Stay until SIGTERM when everything is done: a pod that ends is started again, and its log
    /// shows a run that found nothing.
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    view: View,
}

impl Arguments {
    pub(super) fn execute(self) -> Result<()> {
        // As the first process of a container it would ignore a signal that it does not handle.
        let wait = self.wait.then(Signals::block).transpose()?;
        self.clean_up()?;
        wait.map_or(Ok(()), Signals::wait)
    }

    fn clean_up(self) -> Result<()> {
        let pins = &self.view.pin_dir;
        let devices = dataplane::pinned_devices(pins);
        let removed = dataplane::cleanup(pins)?;
        if removed.is_some() {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let (network, _events) = Network::connect()?;
                node::release(&network, &devices).await
            })?;
        }
        let kept_nat = match kept_nat::release() {
            // A process without the permission to look has created none.
            Err(error) if removed.is_none() && error.kind() == ErrorKind::PermissionDenied => false,
            released => released.context("the nftables table that keeps NAT cannot be removed")?,
        };
        let dir = pins.display();
        // They are left alone, because they serve the agents at their other ends. A process without
        // the permission to look finds none.
        let prepared = veth_peer::devices().unwrap_or_default();
        let mut other_ends: Vec<_> =
            devices.iter().filter_map(|index| check::prepared_other_end(*index)).collect();
        other_ends.dedup();
        let Removed { links, programs, maps } = removed.unwrap_or_default();
        let anything = kept_nat || !links.is_empty() || !programs.is_empty() || !maps.is_empty();
        if self.view.json() {
            return view::print_json(&serde_json::json!({
                "pin_dir": dir.to_string(),
                "links": links,
                "programs": programs,
                "maps": maps,
                "kept_nat": kept_nat,
                "prepared_veths": prepared,
                "prepared_other_ends": other_ends,
            }));
        }
        view::print(|out| {
            for device in &prepared {
                writeln!(
                    out,
                    "{device} stays prepared for XDP at its other end, of which another agent may live: `traffic-policy-agent veth-peer --detach {device}` undoes that"
                )?;
            }
            for device in &other_ends {
                writeln!(
                    out,
                    "the other end of this node's veth, {device}, stays prepared for XDP: `traffic-policy-agent veth-peer --detach` there undoes that"
                )?;
            }
            if !anything {
                return writeln!(out, "nothing is pinned in {dir}");
            }
            if kept_nat {
                writeln!(out, "removed the nftables table that kept NAT for kube-proxy's connections")?;
            }
            for link in &links {
                writeln!(out, "detached {link}")?;
            }
            writeln!(
                out,
                "removed all programs and maps pinned in {dir}: {} links, {} programs, {} maps",
                links.len(),
                programs.len(),
                maps.len()
            )
        })
    }
}

/// SIGTERM and SIGINT, blocked until they are waited for.
struct Signals(SigSet);

impl Signals {
    fn block() -> Result<Self> {
        let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
        signals.thread_block().context("signals cannot be held back")?;
        Ok(Self(signals))
    }

    fn wait(self) -> Result<()> {
        self.0.wait().map(drop).context("SIGTERM cannot be waited for")
    }
}
