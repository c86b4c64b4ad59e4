//! The devices that programs are attached to, and their entries in the map `tp_devices`.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use traffic_policy_ebpf::abi::{DEVICE_XDP, DeviceInfo, HOP_NO_ETHERNET, HOP_ROUTED, HOP_XDP};

use super::{
    Dataplane,
    bpf::{
        attach::{Attached, Interface, Mode, clsact, device, drivers},
        introspect, pins,
        programs::{self, Selection},
    },
    kernel::Kernel,
    maps::{Maps, keys::SetAddresses, reader::Reader},
    nexthop::{Changed, NextHops},
    rivals,
};

/// The programs on devices.
pub trait DevicePrograms {
    /// Attaches the programs to a device.
    ///
    /// # Errors
    /// Programs of another agent are on the device, the kernel or the device's driver refuses them
    /// in the mode that was asked for (see [`Mode`]), or their links cannot be pinned. A device
    /// that was attached to before is served by TC from then on.
    fn attach(&mut self, interface: &Interface) -> Result<Attached>;

    /// Forgets a device that is gone, or no longer wanted.
    fn detach(&mut self, ifindex: u32) -> Result<()>;

    /// Whether the programs are attached to a device as it is now, and in the configured mode.
    fn is_settled(&self, interface: &Interface) -> bool;

    /// Marks a device whose programs must be attached again, because other processes have detached
    /// them.
    fn unsettle(&mut self, ifindex: u32);

    /// Returns the devices with the attach mode of each.
    fn attached(&self) -> impl Iterator<Item = (&Interface, Attached)>;

    /// Returns the devices whose links lack programs because other processes have detached them.
    /// Filters of a clsact qdisc have no link: see [`Self::filters`].
    fn lost(&self) -> Vec<Lost>;

    /// Returns the priority and handle of the filters that TC programs are on this kernel; `None`
    /// if they have links.
    fn filters(&self) -> Option<(u16, u32)>;
}

/// The devices that this agent has attached to.
#[derive(Debug)]
pub struct Devices {
    attached: BTreeMap<u32, (Interface, Attached)>,
    mode: Mode,
    kernel: Kernel,
    /// The folder of the pinned links; `None` if nothing outlives this process (tests).
    links: Option<PathBuf>,
    /// The devices whose programs other processes have detached.
    unsettled: BTreeSet<u32>,
}

/// A device that lacks some of its programs, and the hooks where they are missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    pub ifindex: u32,
    pub name: String,
    pub places: Vec<&'static str>,
}

impl Devices {
    pub fn new(mode: Mode, kernel: Kernel, links: Option<PathBuf>) -> Self {
        Self { attached: BTreeMap::new(), mode, kernel, links, unsettled: BTreeSet::new() }
    }

    /// Whether the MTU of a device with XDP in the driver has grown beyond the one with which the
    /// driver is known to accept the programs.
    fn outgrew_xdp(&self, interface: &Interface) -> bool {
        self.attached.get(&interface.ifindex).is_some_and(|(held, attached)| {
            let page = introspect::page_size();
            let most = || {
                introspect::driver(&interface.name)
                    .and_then(|driver| drivers::most_mtu(&driver, page, self.kernel))
                    .unwrap_or_else(|| drivers::page_mtu(page))
            };
            *attached == Attached::XdpDriver && interface.mtu > held.mtu && interface.mtu > most()
        })
    }

    /// Forgets devices that an earlier agent attached to and that are not attached to now.
    /// `divided`: the device where divided packets of SCTP arrive.
    pub fn forget_others(&self, maps: &mut Maps, divided: Option<u32>) -> Result<()> {
        let present: Vec<u32> = self.attached.keys().copied().collect();
        if let Some(links) = &self.links {
            let linked: Vec<u32> = present.iter().copied().chain(divided).collect();
            device::retain(links, &linked)?;
        }
        let described: Vec<u32> = maps.devices.keys().filter_map(Result::ok).collect();
        for ifindex in described {
            if !present.contains(&ifindex) {
                if !self.kernel.has_tcx() {
                    clsact::detach(ifindex);
                }
                maps.devices.remove(&ifindex).context("forgetting a device failed")?;
            }
        }
        Ok(())
    }

    /// Removes the filters from those of these devices that are not attached to: another layout
    /// version has left them.
    pub fn detach_filters_of_others(&self, devices: BTreeSet<u32>) {
        if !self.kernel.has_tcx() {
            let others = devices.into_iter().filter(|ifindex| !self.attached.contains_key(ifindex));
            others.for_each(clsact::detach);
        }
    }

    /// Removes filters, which unlike links do not disappear with their pins.
    pub fn detach_filters(&self) {
        if !self.kernel.has_tcx() {
            self.attached.keys().copied().for_each(clsact::detach);
        }
    }

    /// Returns the folder of the pinned links; `None` if nothing outlives this process (tests).
    pub fn links_folder(&self) -> Option<&Path> {
        self.links.as_deref()
    }

    pub fn kernel(&self) -> Kernel {
        self.kernel
    }

    fn links(&self, interface: &Interface) -> device::Links {
        device::Links::new(self.links.as_deref().unwrap_or(Path::new("/nonexistent")), interface)
    }
}

impl DevicePrograms for Dataplane {
    fn attach(&mut self, interface: &Interface) -> Result<Attached> {
        if let Some(root) = &self.config.pins {
            rivals::refuse(root, &interface.name, interface.ifindex)?;
        }
        if !interface.ethernet {
            self.ensure_l3()?;
        }
        let links = self.devices.links(interface);
        if self.maps.devices.get(&interface.ifindex, 0).is_err() {
            // Endpoints behind the device were treated as pods of this node so far.
            self.raise(Changed::Routes);
        }
        // The device is announced before its first packet can arrive, so that it is not mistaken
        // for a pod's device.
        describe(&mut self.maps, interface, None)?;
        if self.devices.outgrew_xdp(interface) {
            // Setting the same program again does nothing in the kernel: it would not call the
            // driver. virtio_net, for one, continues silently and drops frames longer than a page.
            links.detach_xdp()?;
        }
        let Devices { mode, kernel, .. } = self.devices;
        let attached = links.attach(&mut self.object, mode, interface.wire, kernel);
        if attached.is_err() {
            self.without_xdp(interface)?;
        }
        let attached = attached?;
        describe(&mut self.maps, interface, Some(attached))?;
        self.devices.attached.insert(interface.ifindex, (interface.clone(), attached));
        self.devices.unsettled.remove(&interface.ifindex);
        Ok(attached)
    }

    fn detach(&mut self, ifindex: u32) -> Result<()> {
        self.devices.unsettled.remove(&ifindex);
        if let Some((interface, _)) = self.devices.attached.remove(&ifindex) {
            self.devices.links(&interface).detach()?;
        }
        if !self.devices.kernel.has_tcx() {
            clsact::detach(ifindex);
        }
        // It may never have been described.
        let _ = self.maps.devices.remove(&ifindex);
        Ok(())
    }

    fn is_settled(&self, interface: &Interface) -> bool {
        let Devices { attached, mode, unsettled, .. } = &self.devices;
        attached.get(&interface.ifindex).is_some_and(|(held, attached)| {
            let lost_xdp = *attached == Attached::Tc && interface.ethernet && mode.is_xdp();
            held == interface && !lost_xdp && !unsettled.contains(&interface.ifindex)
        })
    }

    fn unsettle(&mut self, ifindex: u32) {
        self.devices.unsettled.insert(ifindex);
    }

    fn attached(&self) -> impl Iterator<Item = (&Interface, Attached)> {
        self.devices.attached.values().map(|(interface, attached)| (interface, *attached))
    }

    fn lost(&self) -> Vec<Lost> {
        let devices = &self.devices;
        if devices.links.is_none() {
            return Vec::new();
        }
        let lost = devices.attached.values().map(|(interface, attached)| Lost {
            ifindex: interface.ifindex,
            name: interface.name.clone(),
            places: devices.links(interface).lost(&self.object, *attached, devices.kernel),
        });
        lost.filter(|lost| !lost.places.is_empty()).collect()
    }

    fn filters(&self) -> Option<(u16, u32)> {
        (!self.devices.kernel.has_tcx()).then_some((clsact::PRIORITY, clsact::HANDLE))
    }
}

impl Dataplane {
    /// Loads the programs of devices without Ethernet before the first one is attached to.
    fn ensure_l3(&mut self) -> Result<()> {
        if !self.programs.l3 {
            let wanted = Selection { l3: true, ..self.programs };
            programs::extend(&mut self.object, &mut self.maps, &mut self.programs, wanted)?;
        }
        Ok(())
    }

    /// Handles a failed attempt: XDP must not send frames to a device that may have lost its
    /// program.
    fn without_xdp(&mut self, interface: &Interface) -> Result<()> {
        let Some((_, attached)) = self.devices.attached.get_mut(&interface.ifindex) else {
            // Its packets do not pass our programs, so nothing may rely on the device.
            let _ = self.maps.devices.remove(&interface.ifindex);
            return Ok(());
        };
        if *attached == Attached::Tc {
            return Ok(());
        }
        *attached = Attached::Tc;
        describe(&mut self.maps, interface, Some(Attached::Tc))?;
        self.raise(Changed::Routes);
        Ok(())
    }
}

/// Writes the facts about a device that the packet path needs. `attached`: the attach mode; `None`
/// if it is unchanged.
fn describe(maps: &mut Maps, interface: &Interface, attached: Option<Attached>) -> Result<()> {
    let held = maps.devices.get(&interface.ifindex, 0).ok();
    let mut device = DeviceInfo {
        mac: interface.mac,
        zero: 0,
        flags: match (interface.ethernet, attached) {
            (false, _) if interface.point_to_point => HOP_NO_ETHERNET,
            (false, _) => HOP_NO_ETHERNET | HOP_ROUTED,
            // The driver also accepts frames from XDP.
            (true, Some(Attached::XdpDriver)) => HOP_XDP | DEVICE_XDP,
            (true, Some(Attached::XdpGeneric)) => DEVICE_XDP,
            (true, Some(Attached::Tc)) => 0,
            // XDP may see the first packet of a new device before its attach mode is known.
            (true, None) => held.map_or(DEVICE_XDP, |held| held.flags),
        },
        mtu: interface.mtu,
        addresses: [0; 3],
    };
    device.set_addresses(interface.addresses.iter().copied());
    if held == Some(device) {
        return Ok(());
    }
    maps.devices.insert(interface.ifindex, device, 0).context("writing a device failed")
}

/// Returns the numbers of the devices that the packet path pinned below `root` is attached to, of
/// any layout version (the key of the map is the same in all of them); empty if there are none.
pub fn pinned_devices(root: &Path) -> BTreeSet<u32> {
    let devices = pins::maps_of_versions(root).unwrap_or_default().into_iter().filter_map(|maps| {
        // The map is called `DEVICES` before version 3.
        let devices = Reader::open(&maps, "tp_devices").or_else(|_| Reader::open(&maps, "DEVICES"));
        // The version has no such map, or another process has just removed the folder.
        devices.ok()?.keys::<u32>().ok()
    });
    devices.flatten().collect()
}
