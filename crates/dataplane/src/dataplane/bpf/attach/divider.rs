//! The program at TC ingress of the device where divided packets of SCTP arrive, attached by a
//! pinned link named `divider-NUMBER-NAME`, or below Linux 6.6 by a filter.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use aya::{
    Ebpf,
    programs::{SchedClassifier, TcAttachType},
};
use nix::net::if_::if_indextoname;

use super::{super::pins::remove_link, tc};
use crate::{
    dataplane::{kernel::Kernel, sys},
    node::sctp_divider::{NAMES, Pair},
};

/// The program is that of TC egress: what arrives here is on its way out.
const PROGRAM: &str = "tp_tc_egress";
const PREFIX: &str = "divider-";

/// Attaches the program; that of an earlier agent is replaced in one step. Links of devices that
/// are gone are removed.
pub fn attach(object: &mut Ebpf, links: &Path, pair: Pair, kernel: Kernel) -> Result<()> {
    let own = path(links, pair);
    for entry in fs::read_dir(links).into_iter().flatten().flatten() {
        if is_link(&entry.path()) && entry.path() != own {
            remove_link(&entry.path())?;
        }
    }
    let program: &mut SchedClassifier = object
        .program_mut(PROGRAM)
        .with_context(|| format!("the packet path has no program {PROGRAM}"))?
        .try_into()?;
    // Somebody may have renamed it.
    let name = if_indextoname(pair.peer).with_context(|| format!("the peer of {} is gone", NAMES[0]))?;
    let name = name.to_string_lossy();
    let attached = tc::put(program, &name, TcAttachType::Ingress, &own, kernel);
    attached.with_context(|| format!("attaching {PROGRAM} to {name} failed"))
}

/// Whether the program is still on the device, by its link. A filter, which has none, is put there
/// again.
pub fn is_intact(object: &Ebpf, links: &Path, pair: Pair) -> bool {
    let program = object.program(PROGRAM).and_then(|program| Some(program.info().ok()?.id()));
    let held = sys::link_info(&path(links, pair)).ok();
    held.is_some_and(|held| held.target[0] == pair.peer && Some(held.program) == program)
}

/// Whether a pin is the link of this program.
fn is_link(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(PREFIX))
}

fn path(links: &Path, pair: Pair) -> PathBuf {
    links.join(format!("{PREFIX}{}-{}", pair.peer, NAMES[1]))
}
