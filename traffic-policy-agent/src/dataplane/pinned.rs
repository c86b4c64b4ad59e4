//! The packet path as anyone may look at it by its pins, whether or not an agent runs.
//!
//! Maps are opened for reading only, with one exception: whoever listens to events says so in a word of
//! `STATE`, and empties `EVENT_BUCKETS` first.

mod counts;
mod flows;
mod links;
mod listener;
mod maps;
mod read;
mod report;
mod services;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use aya::Pod;
use traffic_policy_ebpf::abi::ABI_VERSION;

pub use self::{
    counts::{Count, Counts, ServiceCount, service_count_reader},
    flows::{Flow, FlowState, Traffic, Way},
    links::{Link, LinkHook, device_name},
    listener::{Event, Listener},
    maps::MapFill,
    read::Reader,
    report::{Life, Report},
    services::{Phase, Reached, ServicePort, frontend_kind, key as service_key},
};
use super::pins;

/// The pinned packet path of this layout version.
#[derive(Debug)]
pub struct Pinned {
    root: PathBuf,
}

impl Pinned {
    /// Looks for it below `root`, the folder that `run` was given as `--pin-dir`.
    ///
    /// # Errors
    /// Nothing is pinned there, or what another version of this program reads.
    pub fn open(root: &Path) -> Result<Self> {
        if pins::maps_below(root).join("STATE").exists() {
            return Ok(Self { root: root.to_owned() });
        }
        let others = pins::versions(root)?;
        if let Some(other) = others.first() {
            bail!(
                "the packet path pinned below {} has layout {other}, this program reads v{ABI_VERSION}: use the traffic-policy-agent that made it",
                root.display()
            );
        }
        if let Some(process) = pins::Look::at(root)?.used_by {
            bail!(
                "the agent (process {process}) is starting and has not made its maps yet: ask again in a moment"
            );
        }
        bail!("no packet path is pinned below {}: is `run` given another --pin-dir?", root.display())
    }

    fn map(&self, name: &str) -> Result<Reader> {
        Reader::open(&pins::maps_below(&self.root), name)
    }

    /// The one element of an array.
    fn element<V: Pod>(&self, name: &str) -> Result<V> {
        self.map(name)?.value(0)
    }
}
