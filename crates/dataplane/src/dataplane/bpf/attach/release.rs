//! Detaching XDP from a device whose driver would refuse to release the program.
//!
//! virtio_net before Linux 6.3 checks the MTU also when a program is detached (`virtnet_xdp_set`;
//! fixed by "virtio-net: set up xdp for multi buffer packets"). Above its limit it refuses. The
//! kernel warns in its log and forgets the program all the same, and the driver continues to run
//! it, dropping every frame longer than a page, until the machine reboots.

use std::{
    ffi::{CStr, CString},
    io,
    os::fd::AsRawFd,
    path::Path,
};

use nix::net::if_::{if_indextoname, if_nameindex};
use socket2::{Domain, Socket, Type};

use super::{super::introspect, drivers};
use crate::dataplane::{kernel::Kernel, sys};

/// A device at the MTU at which its driver releases a program. Dropping this restores its own MTU,
/// and those of the devices on top of it, which follow only downwards (VLAN, macvlan); devices in
/// other network namespaces are out of reach.
#[derive(Debug)]
pub struct Lowered {
    /// The devices with their own MTUs; the device itself is the first.
    devices: Vec<(CString, u32)>,
    lowered: u32,
}

impl Lowered {
    /// Lowers the MTU of the device of a pinned link, if that is needed. Longer frames are lost for
    /// that moment, as all of them were since the MTU was raised.
    pub fn for_link(pin: &Path) -> Option<Self> {
        let index = index(pin)?;
        // A link whose device is gone is attached to no device.
        if sys::link_info(pin).ok()?.target[0] != index {
            return None;
        }
        let device = if_indextoname(index).ok()?;
        let name = device.to_string_lossy().into_owned();
        let (kernel, _) = Kernel::found().ok()?;
        let own = mtu(&device, None).ok()?;
        let driver = introspect::driver(&name)?;
        let lowered = releases_at(kernel, &driver, own, introspect::page_size())?;
        let mut devices = vec![(device.clone(), own)];
        for other in &if_nameindex().ok()? {
            match mtu(other.name(), None) {
                Ok(own) if own > lowered && other.name() != &*device => {
                    devices.push((other.name().to_owned(), own));
                }
                _ => {}
            }
        }
        if let Err(error) = mtu(&devices[0].0, Some(lowered)) {
            tracing::warn!(
                device = name,
                "the driver keeps the XDP program, and drops what is longer than a page, for it gives a program back only up to MTU {lowered}, and that cannot be set ({error}): set it by hand (`ip link set {name} mtu {lowered}`) before the agent starts again or is cleaned up"
            );
            return None;
        }
        tracing::info!(
            device = name,
            "MTU {lowered} instead of {own} for a moment: the driver gives XDP back no other way before Linux 6.3"
        );
        Some(Self { devices, lowered })
    }
}

impl Drop for Lowered {
    fn drop(&mut self) {
        for (device, own) in &self.devices {
            // An MTU that was changed in the meantime is kept, and most devices have not followed.
            if mtu(device, None).is_ok_and(|now| now != self.lowered) {
                continue;
            }
            if let Err(error) = mtu(device, Some(*own)) {
                let name = device.to_string_lossy().into_owned();
                tracing::error!(
                    device = name,
                    "the MTU is left at {} ({error}): `ip link set {name} mtu {own}`",
                    self.lowered
                );
            }
        }
    }
}

/// Returns the device's number in the name of a link's pin, if the link is of XDP in the driver:
/// `xdp-2-eth0`.
fn index(pin: &Path) -> Option<u32> {
    pin.file_name()?.to_str()?.strip_prefix("xdp-")?.split('-').next()?.parse().ok()
}

/// Returns the MTU at which a driver releases a program; `None` if it does so at the current one.
fn releases_at(kernel: Kernel, driver: &str, mtu: u32, page: usize) -> Option<u32> {
    let most = drivers::page_mtu(page);
    (driver == "virtio_net" && !kernel.at_least(6, 3) && mtu > most).then_some(most)
}

/// Reads the MTU of a device, or sets it.
fn mtu(device: &CStr, wanted: Option<u32>) -> io::Result<u32> {
    const SIOCGIFMTU: libc::Ioctl = 0x8921;
    const SIOCSIFMTU: libc::Ioctl = 0x8922;
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)?;
    // SAFETY: an all-zero ifreq is a valid value of that plain C struct.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(device.to_bytes()) {
        *to = from.cast_signed() as libc::c_char;
    }
    request.ifr_ifru.ifru_mtu = wanted.unwrap_or_default().cast_signed();
    let what = if wanted.is_some() { SIOCSIFMTU } else { SIOCGIFMTU };
    // SAFETY: the request names a device and outlives the call.
    if unsafe { libc::ioctl(socket.as_raw_fd(), what, &raw mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: both commands leave the MTU in this field.
    Ok(unsafe { request.ifr_ifru.ifru_mtu }.cast_unsigned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: Kernel = Kernel { major: 6, minor: 1 };

    #[test]
    fn only_where_the_driver_would_refuse() {
        assert_eq!(releases_at(OLD, "virtio_net", 9000, 4096), Some(3506));
        assert_eq!(releases_at(OLD, "virtio_net", 3506, 4096), None);
        assert_eq!(releases_at(OLD, "virtio_net", 9000, 65_536), None);
        assert_eq!(releases_at(OLD, "ena", 9000, 4096), None);
        assert_eq!(releases_at(Kernel { major: 6, minor: 3 }, "virtio_net", 9000, 4096), None);
    }

    #[test]
    fn pins_of_xdp_in_the_driver_have_a_device() {
        assert_eq!(index(Path::new("/sys/fs/bpf/x/v1/links/xdp-12-eth0")), Some(12));
        for other in ["xdpgeneric-12-eth0", "ingress-12-eth0", "connect4", "xdp-x-eth0"] {
            assert_eq!(index(Path::new(other)), None, "{other}");
        }
    }

    #[test]
    fn the_mtu_of_a_device_is_read() {
        assert!(mtu(c"lo", None).unwrap() >= 1280);
        assert!(mtu(c"no-such-device", None).is_err());
    }
}
