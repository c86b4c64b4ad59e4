//! The object with the programs of the bench: feed, floors, generator and sink.

use anyhow::{Context, Result};
use aya::{Ebpf, EbpfLoader};

#[cfg(bpf_object)]
const OBJECT: Option<&[u8]> =
    Some(aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/traffic-policy-bench")));
#[cfg(not(bpf_object))]
const OBJECT: Option<&[u8]> = None;

/// Loads the object into the kernel, with the settings of the loader.
pub fn load(loader: &mut EbpfLoader<'_>) -> Result<Ebpf> {
    let object = OBJECT.context("no programs to compare with: run `cargo xtask setup` and build again")?;
    loader.load(object).context("the kernel refuses the maps of the bench")
}
