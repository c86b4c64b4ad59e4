//! Offloads of a device, switched with the ethtool ioctl.
//!
//! XDP sees raw bytes: with checksum offload a veth delivers frames whose checksum was never
//! finished, and a receiver that trusts its "hardware" never notices a wrong one. With offload off,
//! every checksum on the wire is complete and verified.

use std::io;
use std::os::fd::AsRawFd;

use anyhow::{Context, Result};
use nix::libc;
use socket2::{Domain, Socket, Type};

use crate::netns::Namespace;

const SIOCETHTOOL: libc::Ioctl = 0x8946;

/// The set-commands of linux/ethtool.h, each of which takes one number.
#[derive(Clone, Copy)]
#[repr(u32)]
enum Feature {
    RxChecksum = 0x15,
    TxChecksum = 0x17,
    Segmentation = 0x24,
    TcpSegmentation = 0x1f,
    ReceiveAggregation = 0x2c,
}

#[repr(C)]
struct EthtoolValue {
    command: u32,
    data: u32,
}

impl Namespace {
    /// Switches checksum offload of both directions and segmentation offload.
    pub fn set_offloads(&self, device: &str, on: bool) -> Result<()> {
        let features =
            [Feature::RxChecksum, Feature::TxChecksum, Feature::TcpSegmentation, Feature::Segmentation];
        self.run(|| features.iter().try_for_each(|feature| set(device, *feature, on)))
            .with_context(|| format!("offloads of {} {device}", self.name()))
    }

    /// Switches GRO, which on a veth also creates its receive ring. Frames that the *other* end
    /// sends by an XDP redirect arrive only with it, or with an XDP program at this end (XDP_TX
    /// needs the latter, see [`crate::xdp`]).
    pub fn set_gro(&self, device: &str, on: bool) -> Result<()> {
        self.run(|| set(device, Feature::ReceiveAggregation, on))
            .with_context(|| format!("GRO of {} {device}", self.name()))
    }
}

fn set(device: &str, feature: Feature, on: bool) -> Result<()> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)?;
    let mut value = EthtoolValue { command: feature as u32, data: on.into() };
    // SAFETY: an all-zero ifreq is a valid value of that plain C struct.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    anyhow::ensure!(device.len() < request.ifr_name.len(), "{device} is too long for a device name");
    for (to, from) in request.ifr_name.iter_mut().zip(device.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    // SAFETY: the request names a device and points to a value that outlives the call and has the
    // layout that each of these commands reads.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) };
    let error = io::Error::last_os_error();
    // A veth whose other end has an XDP program cannot do segmentation at all: it is off
    // permanently.
    let off_anyway = !on && error.raw_os_error() == Some(libc::EOPNOTSUPP);
    anyhow::ensure!(result == 0 || off_anyway, error);
    Ok(())
}
