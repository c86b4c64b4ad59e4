//! A wire between two tun devices. They carry IP packets without Ethernet, as IPIP, GRE and
//! WireGuard do, and need no module that a machine may lack; packets that leave by one arrive on
//! the other.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

use anyhow::{Context, Result, ensure};
use tokio::io::unix::AsyncFd;

use crate::netns::{Namespace, Running};

/// `TUNSETIFF` of linux/if_tun.h.
const SET_INTERFACE: libc::Ioctl = 0x4004_54ca;
/// The file by which tun devices are made.
const NODE: &str = "/dev/net/tun";
/// More bytes than any packet has.
const BUFFER: usize = 65_536 + 64;

/// The device at one end.
#[derive(Clone, Copy, Debug)]
pub struct TunEnd<'a> {
    pub namespace: &'a Namespace,
    pub name: &'a str,
    pub mtu: u32,
}

/// The wire. Dropping it removes both devices.
#[derive(Debug)]
pub struct TunWire {
    _copiers: [Running<Result<()>>; 2],
}

impl TunEnd<'_> {
    /// Makes a tun device that is up; it is removed with the last handle of the file.
    pub fn create(self) -> Result<File> {
        let file = self.namespace.run(|| open(self.name)).with_context(|| format!("making {}", self.name))?;
        self.namespace.netlink(async |net| {
            net.set_mtu(self.name, self.mtu).await?;
            net.up(self.name).await
        })?;
        Ok(file)
    }
}

impl TunWire {
    /// Makes both devices, which are up.
    pub fn join(one: TunEnd<'_>, other: TunEnd<'_>) -> Result<Self> {
        let ends = [one.create()?, other.create()?];
        let [a, b] = &ends;
        let copier = |from: &File, to: &File, end: TunEnd<'_>| {
            let (from, to) = (from.try_clone()?, to.try_clone()?);
            Ok::<_, anyhow::Error>(end.namespace.start("tun", async move |mut stop| {
                tokio::select! {
                    () = stop.requested() => Ok(()),
                    ended = copy(from, to) => ended,
                }
            }))
        };
        Ok(Self { _copiers: [copier(a, b, one)?, copier(b, a, other)?] })
    }
}

fn open(name: &str) -> Result<File> {
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).custom_flags(libc::O_NONBLOCK).open(NODE);
    let file = file.with_context(|| format!("{NODE} cannot be opened: is the module tun there?"))?;
    // SAFETY: an `ifreq` consists of numbers and bytes only.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    ensure!(name.len() < request.ifr_name.len(), "{name} is too long for a device");
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: the kernel reads and writes one `ifreq`.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), SET_INTERFACE, &raw mut request) };
    ensure!(result == 0, "{}", std::io::Error::last_os_error());
    Ok(file)
}

async fn copy(from: File, to: File) -> Result<()> {
    // SAFETY: the file keeps its descriptor until it is dropped, together with the registration.
    let from = unsafe { AsyncFd::register(from) }
        .map_err(|error| anyhow::anyhow!("watching a tun device: {error}"))?;
    let mut buffer = vec![0; BUFFER];
    loop {
        let mut ready = from.readable().await?;
        let Ok(read) = ready.try_io(|file| file.get_ref().read(&mut buffer)) else { continue };
        let length = read.context("reading from a tun device")?;
        match (&to).write(&buffer[..length]) {
            // The other end has no room, or is down: the packet is lost, as on any wire.
            Err(error)
                if !matches!(error.kind(), ErrorKind::WouldBlock)
                    && error.raw_os_error() != Some(libc::EIO) =>
            {
                return Err(error).context("writing to a tun device");
            }
            _ => {}
        }
    }
}
