//! `cleanup`: restores the node to its state before the first `run`.

use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result};
use clap::Args;
use nix::sys::signal::{SigSet, Signal};
use tokio::runtime::{Builder, Runtime};
use traffic_policy_cluster::source::{Access, SERVICE_ACCOUNT, Withdrawal};
use traffic_policy_dataplane::{
    self as dataplane, PinsLook, Removed,
    inspect::Pinned,
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
    opening: OpeningArguments,
    #[command(flatten)]
    view: View,
}

/// The Lease by which other nodes learn that this one opens packets.
#[derive(Debug, Args)]
struct OpeningArguments {
    /// The namespace that `run --announce-opening` is given: before anything is detached, the other
    /// nodes are told to forward nothing directly to this one, and have ten seconds to hear of it.
    #[arg(long, env = "TRAFFIC_POLICY_ANNOUNCE_OPENING", value_name = "NAMESPACE", requires = "node_name")]
    announce_opening: Option<String>,
    /// Name of this node's Node object, for --announce-opening.
    #[arg(long, env = "TRAFFIC_POLICY_NODE_NAME", value_name = "N")]
    node_name: Option<String>,
    /// Kubeconfig for --announce-opening. Default: in-cluster, by service account.
    #[arg(long, env = "TRAFFIC_POLICY_KUBECONFIG", value_name = "F", conflicts_with = "api_server")]
    kubeconfig: Option<PathBuf>,
    /// In-cluster: a real address of the API server, for --announce-opening.
    #[arg(long, env = "TRAFFIC_POLICY_API_SERVER", value_name = "URL")]
    api_server: Option<String>,
    /// Detach although other nodes may go on forwarding packets directly to this one, which are
    /// lost then.
    #[arg(long)]
    force: bool,
}

/// The time for which the other nodes hear that this one opens no packets, before it opens none.
const HEARD: Duration = Duration::from_secs(10);

impl OpeningArguments {
    /// Tells the other nodes to forward nothing directly to this one, and waits until they have
    /// heard of it. Returns what is to be removed at the end.
    fn withdraw(&self, runtime: &Runtime, pins: &Path) -> Result<Option<Withdrawal>> {
        let look = PinsLook::at(pins)?;
        if look.used_by.is_some() {
            // The clean-up itself refuses, and the agent would say again that it opens packets.
            return Ok(None);
        }
        let (Some(namespace), Some(node)) = (&self.announce_opening, &self.node_name) else {
            anyhow::ensure!(
                self.force || !takes_part(pins),
                "other nodes may forward packets directly to pods of this one, and they would be lost: give --announce-opening NAMESPACE \
                 with --node-name, and --kubeconfig or --api-server, as `run` has them, so that they are told first; or, if this node's \
                 Lease traffic-policy-opens-NODE is gone already, --force"
            );
            return Ok(None);
        };
        let access = match &self.kubeconfig {
            Some(file) => Access::Kubeconfig(file.clone()),
            None => Access::InCluster {
                api_server: self.api_server.clone(),
                service_account: SERVICE_ACCOUNT.into(),
            },
        };
        let told = runtime.block_on(async {
            let withdrawal = Withdrawal::begin(&access, namespace, node).await?;
            if withdrawal.stop_opening("its programs are being removed").await? {
                tracing::info!(
                    "the other nodes are told to forward nothing directly to this one; its programs go in {} s",
                    HEARD.as_secs()
                );
                tokio::time::sleep(HEARD).await;
            }
            anyhow::Ok(withdrawal)
        });
        match told {
            Ok(withdrawal) => Ok(Some(withdrawal)),
            Err(error) if self.force => {
                tracing::warn!("{error:#}");
                Ok(None)
            }
            Err(error) => Err(error.context(
                "nothing is detached, because other nodes may forward packets directly to this one (--force detaches all the same)",
            )),
        }
    }
}

/// Whether packets of other nodes are opened here: their addresses are in the maps.
fn takes_part(pins: &Path) -> bool {
    // There may be no packet path of this version.
    ["tp_direct_from4", "tp_direct_from6"].iter().any(|name| {
        let count = Pinned::open(pins).and_then(|pinned| pinned.map(name)?.count());
        count.is_ok_and(|addresses| addresses > 0)
    })
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
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let withdrawal = self.opening.withdraw(&runtime, pins)?;
        let devices = dataplane::pinned_devices(pins);
        let removed = dataplane::cleanup(pins)?;
        if removed.is_some() {
            runtime.block_on(async {
                let (network, _events) = Network::connect()?;
                node::release(&network, &devices).await
            })?;
        }
        if let Some(withdrawal) = withdrawal
            && let Err(error) = runtime.block_on(withdrawal.remove())
        {
            // It says that nothing is opened here.
            tracing::warn!("{error:#}");
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
