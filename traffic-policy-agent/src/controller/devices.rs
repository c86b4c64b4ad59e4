//! The devices that packets come by: which ones are wanted, what is attached to them, and when they
//! have to be looked at again.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use anyhow::Result;
use tokio::time::Instant;
use traffic_policy_cluster::source::{ObjectEvent, Subject};
use traffic_policy_dataplane::{
    Attached, DevicePrograms, Interface, Mode, PacketPath,
    node::{self, Address, Header, Link, Network, Route, ethtool},
};

use super::attachments::Attachments;
use crate::check;

/// Delay before a device that is no longer wanted is detached from: a default route is absent for a
/// moment while it is replaced.
const UNWANTED: Duration = Duration::from_secs(30);
/// Devices of this node, as `--device` and `--attach` say.
pub(super) struct Devices {
    /// Value of `--device`; if empty, devices are found by routes and addresses.
    named: Vec<String>,
    /// Value of `--attach`.
    mode: Mode,
    /// Named devices that do not exist at present.
    missing: BTreeSet<String>,
    /// Devices that could not be attached to and have been logged.
    warned_of: BTreeSet<u32>,
    /// Names of devices that are not attached to although they lead to other nodes, and that have
    /// been reported.
    left_out: BTreeSet<String>,
    /// Whether the devices could not be read, or one of them could not be attached to.
    needs_rescan: bool,
    /// Addresses of the Node object at the time of the last search for devices.
    primary: Vec<IpAddr>,
    attachments: Attachments,
    /// Attached devices that are no longer wanted, and since when.
    unwanted: BTreeMap<u32, Instant>,
    /// Devices on a wire that are served without XDP in the driver although `auto` prefers it, and
    /// that have been reported.
    fell_back: BTreeSet<u32>,
    /// Events of the Node that have not been posted yet.
    events: Vec<ObjectEvent>,
    /// The function [`ethtool::strips_vlans`]; tests replace it.
    strips_vlans: fn(u32) -> bool,
}

/// The node's devices, routes and addresses, as last read.
#[derive(Clone, Copy, Default)]
pub(super) struct Surroundings<'a> {
    pub(super) links: &'a [Link],
    pub(super) routes: &'a [Route],
    pub(super) addresses: &'a [Address],
}

impl Devices {
    pub(super) fn new(named: Vec<String>, mode: Mode) -> Self {
        Self {
            named,
            mode,
            missing: BTreeSet::new(),
            warned_of: BTreeSet::new(),
            left_out: BTreeSet::new(),
            needs_rescan: false,
            primary: Vec::new(),
            attachments: Attachments::default(),
            unwanted: BTreeMap::new(),
            fell_back: BTreeSet::new(),
            events: Vec::new(),
            strips_vlans: ethtool::strips_vlans,
        }
    }

    /// Replaces `strips_vlans`, which decides by index whether a device strips VLAN tags.
    #[cfg(test)]
    pub(super) fn stripping(self, strips_vlans: fn(u32) -> bool) -> Self {
        Self { strips_vlans, ..self }
    }

    /// Whether devices are found by routes and addresses.
    pub(super) fn are_found(&self) -> bool {
        self.named.is_empty()
    }

    /// Whether devices have to be read again.
    pub(super) fn needs_rescan(&self) -> bool {
        self.needs_rescan || self.unwanted.values().any(|since| since.elapsed() >= UNWANTED)
    }

    /// Notes that devices have to be read again. The note holds until they have been read; if that
    /// fails, the next maintenance tries again.
    pub(super) fn want_rescan(&mut self) {
        self.needs_rescan = true;
    }

    /// Notes that devices keep their programs for now.
    pub(super) fn stay(&mut self) {
        self.needs_rescan = false;
    }

    /// Records that a rescan has failed: maintenance tries again.
    pub(super) fn rescan_failed(&mut self, error: &anyhow::Error) {
        tracing::warn!("looking at the devices failed: {error:#}");
        self.needs_rescan = true;
    }

    /// Whether devices follow from the Node's addresses, and these differ from the addresses of the
    /// last search.
    pub(super) fn depends_on(&self, primary: &[IpAddr]) -> bool {
        self.named.is_empty() && primary != self.primary
    }

    /// Returns the state of programs that others detached.
    pub(super) fn attachments(&self) -> &Attachments {
        &self.attachments
    }

    /// Returns the Events of the Node since the last call.
    pub(super) fn take_events(&mut self) -> Vec<ObjectEvent> {
        let mut events = std::mem::take(&mut self.events);
        events.extend(self.attachments.take_events());
        events
    }

    /// Notes that a device is served by another hook than XDP in its driver, where the latter was
    /// to be tried.
    fn note_mode(&mut self, link: &Link, attached: Attached) {
        if self.mode != Mode::Auto || !link.wire || attached == Attached::XdpDriver {
            self.fell_back.remove(&link.index);
            return;
        }
        if self.fell_back.insert(link.index) {
            let hidden = self.hides_vlans(link);
            let why = if hidden {
                "takes VLAN tags out of frames before XDP sees them, and VLANs are on it"
            } else {
                "takes no XDP in its driver"
            };
            let message = format!(
                "{} {why}: packets are taken by {attached}, which costs more for each; `traffic-policy-agent check` says \
                 why, and what helps",
                link.name
            );
            // The log has more on the refusal of a driver.
            if hidden {
                tracing::warn!("{message}");
            }
            self.events.push(ObjectEvent::warning(Subject::Node, "NoDriverXdp", "Attach", message));
        }
    }

    /// Checks that the attachments still exist. Missing ones are attached again: to the cgroup at
    /// once, to devices by the next rescan, which is then due.
    pub(super) async fn look_for_programs(&mut self, path: &mut impl PacketPath, netlink: &Network) {
        if path.is_replacing() {
            return;
        }
        self.needs_rescan |= self.attachments.look(path, netlink).await;
        // Until another layout version is replaced, its programs may be on the cgroup: ours have
        // not been detached then.
        if !path.has_others() {
            self.attachments.restore_cgroup(path);
        }
    }

    /// Attaches to new devices and forgets removed ones. Returns whether routes over them may have
    /// changed.
    ///
    /// At start a device that cannot be attached to is an error; later it is logged, and the others
    /// go on.
    pub(super) fn follow(
        &mut self,
        path: &mut impl DevicePrograms,
        seen: &Surroundings<'_>,
        primary: &[IpAddr],
        start: bool,
    ) -> Result<bool> {
        let Surroundings { links, routes, addresses } = *seen;
        self.primary = primary.to_vec();
        let (mut wanted, missing) = node::wanted(&self.named, links, addresses, routes, &self.primary);
        self.needs_rescan = false;
        let mut changed = false;
        for name in &missing {
            if self.missing.insert(name.clone()) {
                tracing::warn!(device = name, "the device is gone; waiting until it comes back");
            }
        }
        let gone: Vec<(u32, String)> = path
            .attached()
            .filter(|(attached, _)| !links.iter().any(|link| link.index == attached.ifindex))
            .map(|(attached, _)| (attached.ifindex, attached.name.clone()))
            .collect();
        for (ifindex, name) in gone {
            path.detach(ifindex)?;
            self.attachments.forget(ifindex);
            tracing::warn!(device = name, "detached: the device is gone");
            changed = true;
        }
        for (ifindex, name) in self.detach_unneeded(path, &wanted) {
            path.detach(ifindex)?;
            self.attachments.forget(ifindex);
            tracing::info!(device = name, "detached: no route of this node's needs the device any more");
            changed = true;
        }
        for refusal in node::left_out(&self.named, links, addresses, routes, &self.primary) {
            if self.left_out.insert(refusal.name.clone()) {
                tracing::warn!(
                    "{refusal}; what comes by it is not served, and connections to endpoints of other nodes behind it are refused (dropped-unattached-device)"
                );
            }
        }
        // Names do not matter here: these devices stay attached until they are given up.
        let lost = |link: &&Link| {
            self.attachments.is_lost(link.index) && !wanted.iter().any(|wanted| wanted.index == link.index)
        };
        let lost: Vec<&Link> = links.iter().filter(lost).collect();
        wanted.extend(lost);
        for link in wanted {
            let interface = self.interface(link, addresses);
            if path.is_settled(&interface) {
                continue;
            }
            // A device that came back may be of another type than the named one.
            let fit = self.is_fit(link).map_err(anyhow::Error::from);
            match fit.and_then(|()| path.attach(&interface)) {
                Ok(attached) => {
                    self.missing.remove(&link.name);
                    self.warned_of.remove(&link.index);
                    self.attachments.attached(link.index);
                    tracing::info!(device = link.name, mode = %attached, "attached");
                    self.note_mode(link, attached);
                    if attached == Attached::XdpDriver
                        && let Some(lost) = check::lost_at_other_end(&link.name, link.index)
                    {
                        tracing::warn!("{}: {}", lost.found, lost.fix.unwrap_or_default());
                    }
                    changed = true;
                }
                Err(error) if start => return Err(error),
                Err(error) => {
                    self.attachments.failed(link.index, &link.name, &error);
                    if self.warned_of.insert(link.index) {
                        tracing::warn!(device = link.name, "not attached, trying again: {error:#}");
                    }
                    self.needs_rescan = true;
                }
            }
        }
        if start {
            if path.attached().next().is_none() {
                tracing::warn!("no device to attach to: name one with --device");
            }
            // Every attached device was attached before, or is new: no stored next hop can be wrong
            // for these devices.
            return Ok(false);
        }
        Ok(changed)
    }

    /// Returns attached devices that have not been wanted for a while. While no device is wanted,
    /// all stay, because the routes are being changed.
    fn detach_unneeded(&mut self, path: &impl DevicePrograms, wanted: &[&Link]) -> Vec<(u32, String)> {
        // A named device that has been renamed is still the named one.
        let is_wanted = |ifindex| {
            wanted.is_empty() || !self.named.is_empty() || wanted.iter().any(|link| link.index == ifindex)
        };
        let attached = path.attached().map(|(interface, _)| (interface.ifindex, interface.name.clone()));
        let unwanted: Vec<_> = attached.filter(|(ifindex, _)| !is_wanted(*ifindex)).collect();
        self.unwanted.retain(|ifindex, _| unwanted.iter().any(|(unwanted, _)| unwanted == ifindex));
        for (ifindex, _) in &unwanted {
            self.unwanted.entry(*ifindex).or_insert_with(Instant::now);
        }
        let is_due = |(ifindex, _): &(u32, String)| {
            self.unwanted.get(ifindex).is_some_and(|since| since.elapsed() >= UNWANTED)
        };
        let due: Vec<_> = unwanted.into_iter().filter(is_due).collect();
        for (ifindex, _) in &due {
            self.unwanted.remove(ifindex);
        }
        due
    }

    /// Whether a device can be attached to in the requested mode. A device that was not named is
    /// served by TC where XDP is not possible.
    fn is_fit(&self, link: &Link) -> Result<(), node::Refusal> {
        node::Refusal::of(link)?;
        if self.mode.is_xdp() && self.named.contains(&link.name) {
            node::Refusal::of_xdp(link)
        } else {
            Ok(())
        }
    }

    fn interface(&self, link: &Link, addresses: &[Address]) -> Interface {
        Interface {
            name: link.name.clone(),
            ifindex: link.index,
            mac: link.mac,
            mtu: link.mtu,
            running: link.running,
            wire: link.wire && !self.hides_vlans(link),
            ethernet: link.header == Header::Ethernet,
            point_to_point: link.point_to_point,
            addresses: addresses
                .iter()
                .filter(|address| address.link == link.index && address.global)
                .map(|address| address.address)
                .collect(),
        }
    }

    /// Whether XDP would take packets that arrive on a VLAN for packets of the device itself, and
    /// serve node ports there.
    fn hides_vlans(&self, link: &Link) -> bool {
        link.has_vlans && (self.strips_vlans)(link.index)
    }
}
