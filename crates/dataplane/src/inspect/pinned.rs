//! The folder of pins of a packet path, opened for inspection.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use traffic_policy_ebpf::abi::{ABI_VERSION, RuntimeConfig, TableUsage};

use crate::dataplane::{
    bpf::pins,
    maps::reader::{Pod, Reader},
};

/// The pinned packet path of this layout version.
#[derive(Debug)]
pub struct Pinned {
    root: PathBuf,
}

impl Pinned {
    /// Opens the packet path below `root`, the folder that `run` was given as `--pin-dir`.
    ///
    /// # Errors
    /// Nothing is pinned there, or only pins of another layout version, which another version of
    /// this program reads.
    pub fn open(root: &Path) -> Result<Self> {
        if pins::maps_below(root).join("tp_config").exists() {
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

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Opens a map for reading.
    pub fn map(&self, name: &str) -> Result<Reader> {
        Reader::open(&pins::maps_below(&self.root), name)
    }

    /// Returns the single element of an array.
    pub fn element<V: Pod>(&self, name: &str) -> Result<V> {
        self.map(name)?.value(0)
    }

    /// Returns the configuration that the agent writes for the packet path.
    pub fn config(&self) -> Result<RuntimeConfig> {
        self.element("tp_config")
    }

    /// Returns the usage of the tables, as the packet path counts it.
    pub fn usage(&self) -> Result<TableUsage> {
        self.element("tp_table_usage")
    }
}
