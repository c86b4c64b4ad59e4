//! Capture of every frame at a device, with a verdict on its checksums.
//!
//! Frames that an XDP program sends (XDP_TX, redirect) never pass the packet sockets of its own
//! device: capture at the other end of the wire.

use std::fmt;
use std::io::{self, IoSliceMut};
use std::mem::size_of;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::cmsg_space;
use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{ControlMessageOwned, LinkAddr, MsgFlags, recvmsg, setsockopt, sockopt};
use socket2::Socket;

use crate::checksum::{Checksum, verify};
use crate::netns::Namespace;
use crate::packet_socket;

// linux/if_packet.h
const PACKET_AUXDATA: libc::c_int = 8;
const PACKET_OUTGOING: u8 = 4;
const TP_STATUS_CSUMNOTREADY: u32 = 1 << 3;
const TP_STATUS_VLAN_VALID: u32 = 1 << 4;
const AUXDATA_LENGTH: usize = 20;

/// A running capture.
#[derive(Debug)]
pub struct Capture {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<Vec<Frame>>>>,
}

#[derive(Clone, Debug)]
pub struct Frame {
    /// The frame from the link layer on. It is larger than the MTU if the kernel merged it or has
    /// not split it yet.
    pub bytes: Vec<u8>,
    /// Whether this device sent the frame, rather than received it.
    pub outgoing: bool,
    pub checksum: Checksum,
}

impl Capture {
    /// Starts a capture at a device of a namespace. No frame is missed after this returns.
    pub fn start(namespace: &Namespace, device: &str) -> Result<Self> {
        let socket = namespace.run(|| open(device)).with_context(|| format!("capturing at {device}"))?;
        let stop = Arc::new(AtomicBool::new(false));
        let wish = stop.clone();
        let thread = thread::Builder::new().name(format!("capture {device}")).spawn(move || {
            let mut frames = Vec::new();
            let mut buffer = vec![0; 1 << 18];
            loop {
                // Frames that arrived before the request to stop are still read.
                let stopping = wish.load(Ordering::Relaxed);
                match receive(&socket, &mut buffer)? {
                    Some(frame) => frames.push(frame),
                    None if stopping => return Ok(frames),
                    None => {}
                }
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }

    pub fn finish(mut self) -> Result<Vec<Frame>> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("only finish and drop take the thread")?;
        thread.join().map_err(|_| anyhow::anyhow!("the capture panicked"))?
    }

    /// Finishes and returns all frames; fails with the first invalid one.
    pub fn finish_valid(self) -> Result<Vec<Frame>> {
        let frames = self.finish()?;
        let wrong = frames.iter().find(|frame| matches!(frame.checksum, Checksum::Wrong(_)));
        if let Some(frame) = wrong {
            anyhow::bail!("a frame with a wrong checksum: {frame}");
        }
        Ok(frames)
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let direction = if self.outgoing { "out" } else { "in" };
        write!(f, "{direction} {} bytes, checksum {}:", self.bytes.len(), self.checksum)?;
        self.bytes.iter().take(96).try_for_each(|byte| write!(f, " {byte:02x}"))
    }
}

/// The lengths of the longest frames at a device, in bytes from the link layer on; 0 if there was
/// none.
#[derive(Clone, Copy, Debug, Default)]
pub struct Longest {
    pub received: usize,
    pub sent: usize,
}

/// Returns the longest frames that pass a device during a call. Of a frame its length alone is
/// read: Linux 6.1 does not copy all aggregates of SCTP to a packet socket (EFAULT).
pub fn longest(namespace: &Namespace, device: &str, call: impl FnOnce()) -> Result<Longest> {
    let socket = namespace.run(|| open(device)).with_context(|| format!("capturing at {device}"))?;
    call();
    let mut longest = Longest::default();
    let flags = MsgFlags::MSG_TRUNC | MsgFlags::MSG_DONTWAIT;
    loop {
        let mut header = [0; 14];
        let mut parts = [IoSliceMut::new(&mut header)];
        let message = match recvmsg::<LinkAddr>(socket.as_raw_fd(), &mut parts, None, flags) {
            Ok(message) => message,
            Err(Errno::EAGAIN) => return Ok(longest),
            Err(error) => return Err(error).context("receiving a frame"),
        };
        let outgoing = message.address.is_some_and(|address| address.pkttype() == PACKET_OUTGOING);
        let of_direction = if outgoing { &mut longest.sent } else { &mut longest.received };
        *of_direction = message.bytes.max(*of_direction);
    }
}

fn open(device: &str) -> Result<Socket> {
    let socket = packet_socket::unbound()?;
    setsockopt(&socket, sockopt::RcvBufForce, &(64 << 20))?;
    socket.set_read_timeout(Some(Duration::from_millis(20)))?;
    let on: libc::c_int = 1;
    // SAFETY: the value is an int that outlives the call.
    let result = unsafe {
        let length = size_of::<libc::c_int>() as libc::socklen_t;
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_PACKET, PACKET_AUXDATA, (&raw const on).cast(), length)
    };
    ensure!(result == 0, io::Error::last_os_error());
    packet_socket::bind(&socket, device, libc::ETH_P_ALL as u16)?;
    Ok(socket)
}

fn receive(socket: &Socket, buffer: &mut [u8]) -> Result<Option<Frame>> {
    let mut control = cmsg_space!([u8; AUXDATA_LENGTH]);
    let mut parts = [IoSliceMut::new(buffer)];
    let flags = MsgFlags::empty();
    let message = match recvmsg::<LinkAddr>(socket.as_raw_fd(), &mut parts, Some(&mut control), flags) {
        Ok(message) => message,
        // A device that goes down or disappears just sends no more frames.
        Err(Errno::EAGAIN | Errno::EINTR | Errno::ENETDOWN) => return Ok(None),
        Err(error) => return Err(error).context("receiving a frame"),
    };
    let auxiliary = message.cmsgs()?.find_map(|control| match control {
        ControlMessageOwned::Unknown(unknown) if unknown.cmsg_header.cmsg_type == PACKET_AUXDATA => {
            <[u8; AUXDATA_LENGTH]>::try_from(unknown.data_bytes).ok()
        }
        _ => None,
    });
    let auxiliary = auxiliary.context("a frame without PACKET_AUXDATA")?;
    let outgoing = message.address.is_some_and(|address| address.pkttype() == PACKET_OUTGOING);
    let length = message.bytes;
    let status = u32::from_ne_bytes([auxiliary[0], auxiliary[1], auxiliary[2], auxiliary[3]]);
    let mut bytes = buffer[..length].to_vec();
    if status & TP_STATUS_VLAN_VALID != 0 {
        // The kernel has removed the tag; fields 5 and 6 of the structure are its value and its
        // protocol.
        let tag = [auxiliary[19], auxiliary[18], auxiliary[17], auxiliary[16]];
        let tag = if cfg!(target_endian = "little") { tag } else { [tag[1], tag[0], tag[3], tag[2]] };
        bytes.splice(12..12, tag);
    }
    let checksum = verify(&bytes, status & TP_STATUS_CSUMNOTREADY != 0);
    Ok(Some(Frame { bytes, outgoing, checksum }))
}
