//! Replacement of a packet path of another layout version, without manual steps and without a gap.
//!
//! The other version's programs serve on their own maps until this version's maps are filled. Then
//! each of its links gets this version's program in one step, and its maps are removed. Its flows
//! cannot be taken over, because their layout differs.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::{
    Dataplane,
    bpf::{frags, pins},
    devices::pinned_devices,
    maps::reader::Reader,
};

/// The takeover from earlier agents, of this layout version and of others.
pub trait Replacement {
    /// Whether programs of another layout version serve until [`Self::adopt`].
    fn is_replacing(&self) -> bool;

    /// Whether another layout version has left programs or maps that [`Self::drop_replaced`] has
    /// not removed.
    fn has_others(&self) -> bool;

    /// Takes over the links of another layout version: attaching then replaces its programs with
    /// those of this version.
    fn adopt(&mut self) -> Result<()>;

    /// Removes what another layout version has left, whose links have other programs by now.
    fn drop_replaced(&mut self) -> Result<Replaced>;

    /// Forgets devices and cgroups that an earlier agent attached to and that are not attached to
    /// now.
    fn forget_others(&mut self) -> Result<()>;
}

/// The result and cost of a replacement.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replaced {
    /// The replaced versions, as `v2`; there are several if a replacement was interrupted.
    pub versions: Vec<String>,
    /// The number of flows that the other version tracked, as far as they can be counted.
    pub flows: u64,
}

impl Replacement for Dataplane {
    fn is_replacing(&self) -> bool {
        !self.adopted && self.has_others()
    }

    fn has_others(&self) -> bool {
        self.pins.as_ref().is_some_and(|pins| !pins.others().is_empty())
    }

    fn adopt(&mut self) -> Result<()> {
        if let Some(pins) = &self.pins {
            pins.adopt()?;
        }
        self.adopted = true;
        Ok(())
    }

    fn drop_replaced(&mut self) -> Result<Replaced> {
        let Some(pins) = &mut self.pins else { return Ok(Replaced::default()) };
        // Filters do not disappear with a folder of pins, and its maps list their devices.
        self.devices.detach_filters_of_others(pinned_devices(pins.root()));
        let name = |folder: &PathBuf| folder.file_name().map(|name| name.to_string_lossy().into_owned());
        let versions = pins.others().iter().filter_map(name).collect();
        let flows = pins.others().iter().map(|folder| flows(&pins::maps_of(folder))).sum();
        pins.drop_others()?;
        Ok(Replaced { versions, flows })
    }

    fn forget_others(&mut self) -> Result<()> {
        let divided = self.divided();
        self.devices.forget_others(&mut self.maps, divided)?;
        if let Some(pins) = &self.pins {
            frags::forget_other_kind(&pins.maps(), self.config.mode)?;
        }
        self.sockets.forget_others()
    }
}

/// Returns the number of flows in tables of any layout: a flow has two entries.
fn flows(maps: &Path) -> u64 {
    let count = |name| Reader::open(maps, name).and_then(|reader| reader.count()).unwrap_or(0);
    // The tables are called `FLOWS4` and `FLOWS6` before version 3.
    let entries: u64 = ["tp_flows4", "tp_flows6", "FLOWS4", "FLOWS6"].into_iter().map(count).sum();
    entries / 2
}
