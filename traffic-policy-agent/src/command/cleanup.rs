//! `cleanup`: leaves the node as it was before the first `run`.

use std::io::ErrorKind;

use anyhow::{Context, Result};
use clap::Args;

use super::view::{self, View};
use crate::{
    dataplane::{self, Removed},
    node::{self, Network, kept_nat},
};

/// Detach all programs of this agent and free its maps, of any version. Nothing else is touched.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    view: View,
}

impl Arguments {
    pub(super) fn execute(self) -> Result<()> {
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
            // Who may not ask has made none.
            Err(error) if removed.is_none() && error.kind() == ErrorKind::PermissionDenied => false,
            released => released.context("the nftables table that keeps NAT cannot be removed")?,
        };
        let dir = pins.display();
        let Removed { links, programs, maps } = removed.unwrap_or_default();
        let anything = kept_nat || !links.is_empty() || !programs.is_empty() || !maps.is_empty();
        if self.view.json() {
            return view::print_json(&serde_json::json!({
                "pin_dir": dir.to_string(),
                "links": links,
                "programs": programs,
                "maps": maps,
                "kept_nat": kept_nat,
            }));
        }
        view::print(|out| {
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
