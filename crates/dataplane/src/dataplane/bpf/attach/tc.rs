//! Programs of TC on devices: by pinned links, or below Linux 6.6 by filters.

use std::path::Path;

use anyhow::{Context as _, Result};
use aya::programs::{
    LinkOrder, SchedClassifier, TcAttachType,
    links::{FdLink, PinnedLink},
    tc::{SchedClassifierLink, TcAttachOptions},
};

use super::{super::pins::remove_link, clsact};
use crate::dataplane::kernel::Kernel;

/// Attaches a program of TC to a device, by a link that is pinned as `path`: a program on that link
/// is replaced in one step. Below Linux 6.6 it is attached by a filter.
pub(super) fn put(
    program: &mut SchedClassifier,
    device: &str,
    attach_type: TcAttachType,
    path: &Path,
    kernel: Kernel,
) -> Result<()> {
    if !kernel.has_tcx() {
        return clsact::attach(program, device, attach_type);
    }
    if let Some(link) = pinned(path)
        && let Ok(link) = SchedClassifierLink::try_from(link)
    {
        match program.attach_to_link(link) {
            Ok(id) => {
                drop(program.take_link(id)?);
                return Ok(());
            }
            Err(error) => tracing::debug!(device, "the pinned TC link is dead: {error}"),
        }
    }
    remove_link(path)?;
    let options = TcAttachOptions::TcxOrder(LinkOrder::default());
    let id = program.attach_with_options(device, attach_type, options)?;
    let link: FdLink = program.take_link(id)?.try_into().context("TC was attached without a link")?;
    link.pin(path).with_context(|| format!("{} cannot be pinned", path.display()))?;
    Ok(())
}

/// Returns a pinned link, if there is one.
pub(super) fn pinned(path: &Path) -> Option<FdLink> {
    path.exists().then(|| PinnedLink::from_pin(path).ok().map(FdLink::from)).flatten()
}
