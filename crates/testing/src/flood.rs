//! Floods: packets of one kind that differ in source, port or sequence number, sent as raw frames
//! by a device, many with one system call.

use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;
use std::ptr;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::libc;
use socket2::Socket;

use crate::lab::{Addresses, Family};
use crate::netns::Namespace;
use crate::packet::{Packet, Transport};
use crate::packet_socket::open;

/// The number of frames in one system call.
const BATCH: usize = 64;
const ETHERNET: usize = 14;
/// The number of probes that may be outstanding when a batch is sent, and the time for which each
/// is awaited.
const AHEAD: u64 = 2;
const ANSWER: Duration = Duration::from_millis(20);

/// The fields in which the copies of a packet differ.
#[derive(Clone, Copy, Debug)]
pub struct Variation {
    pub source: (IpAddr, u16),
    pub destination_port: u16,
    /// The sequence number; TCP only.
    pub sequence: u32,
}

/// Returns an address of a network that a lab does not use otherwise, 11.0.0.0/8 or
/// 2001:db8:f100::/48: a different one for each of the first 2^24 numbers, in no particular order.
pub fn stranger(family: Family, number: u32) -> IpAddr {
    let mixed = number.wrapping_mul(0x9e_3779) & 0xff_ffff;
    match family {
        Family::V4 => Ipv4Addr::from_bits(11 << 24 | mixed).into(),
        Family::V6 => Ipv6Addr::from_bits(0x2001_0db8_f100_u128 << 80 | u128::from(mixed)).into(),
    }
}

/// The networks of [`stranger`], with their prefix lengths.
pub const STRANGERS: [(IpAddr, u8); 2] = [
    (IpAddr::V4(Ipv4Addr::new(11, 0, 0, 0)), 8),
    (IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0xf100, 0, 0, 0, 0, 0)), 48),
];

/// A frame without the fields of a [`Variation`].
#[derive(Clone, Debug)]
struct Template {
    bytes: Vec<u8>,
    ipv4: bool,
    tcp: bool,
    /// Ones' complement sums of all bytes that the checksums of the IPv4 and the transport header
    /// cover.
    sums: [u32; 2],
}

impl Template {
    /// Makes a template from a packet; its source, destination port and sequence number do not
    /// matter.
    fn new(packet: &Packet) -> Self {
        let nowhere = match packet.destination {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let mut packet = packet.clone().source((nowhere, 0)).destination((packet.destination, 0));
        let tcp = match &mut packet.transport {
            Transport::Tcp(tcp) => {
                tcp.sequence = 0;
                true
            }
            _ => false,
        };
        let mut template =
            Self { bytes: packet.bytes(), ipv4: packet.destination.is_ipv4(), tcp, sums: [0; 2] };
        let sum = |at: usize| u32::from(!word(&template.bytes, at));
        template.sums = [if template.ipv4 { sum(ETHERNET + 10) } else { 0 }, sum(template.checksum())];
        template
    }

    fn transport(&self) -> usize {
        ETHERNET + if self.ipv4 { 20 } else { 40 }
    }

    fn checksum(&self) -> usize {
        self.transport() + if self.tcp { 16 } else { 6 }
    }

    /// Writes a copy over `frame`.
    fn write(&self, copy: &Variation, frame: &mut Vec<u8>) {
        frame.clear();
        frame.extend_from_slice(&self.bytes);
        let mut address = 0;
        let mut rest = 0;
        let put = |frame: &mut Vec<u8>, at: usize, bytes: &[u8], sum: &mut u32| {
            frame[at..at + bytes.len()].copy_from_slice(bytes);
            *sum += bytes.chunks(2).map(|pair| u32::from(word(pair, 0))).sum::<u32>();
        };
        match copy.source.0 {
            IpAddr::V4(source) => put(frame, ETHERNET + 12, &source.octets(), &mut address),
            IpAddr::V6(source) => put(frame, ETHERNET + 8, &source.octets(), &mut address),
        }
        let transport = self.transport();
        put(frame, transport, &copy.source.1.to_be_bytes(), &mut rest);
        put(frame, transport + 2, &copy.destination_port.to_be_bytes(), &mut rest);
        if self.tcp {
            put(frame, transport + 4, &copy.sequence.to_be_bytes(), &mut rest);
        }
        let checksum = self.checksum();
        let finished = finish(self.sums[1] + address + rest);
        // In a datagram, 0 would mean that there is no checksum.
        let finished = if finished == 0 && !self.tcp { 0xffff } else { finished };
        frame[checksum..checksum + 2].copy_from_slice(&finished.to_be_bytes());
        if self.ipv4 {
            let finished = finish(self.sums[0] + address);
            frame[ETHERNET + 10..ETHERNET + 12].copy_from_slice(&finished.to_be_bytes());
        }
    }
}

fn word(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn finish(sum: u32) -> u16 {
    let folded = (sum & 0xffff) + (sum >> 16);
    !(((folded & 0xffff) + (folded >> 16)) as u16)
}

/// A device by which frames leave unchanged, for the host at its other end.
///
/// Frames are sent no faster than that host receives them: after each batch the host gets a request
/// for its MAC address, and answers when it has reached it. Otherwise the queue of its device (256
/// frames for a veth with XDP) would always be full, and the packets of every other sender would be
/// lost.
#[derive(Debug)]
pub struct Wire {
    frames: Socket,
    answers: Socket,
    from: Addresses,
    to: Addresses,
}

impl Wire {
    /// Opens a port of a bridge in `namespace`, whose addresses are `from`; those of the host at
    /// the other end are `to`.
    pub fn open(
        namespace: &Namespace,
        (bridge, device): (&str, &str),
        from: Addresses,
        to: Addresses,
    ) -> Result<Self> {
        let [frames, answers] = namespace
            .run(|| anyhow::Ok([open(device, 0)?, open(bridge, libc::ETH_P_ARP as u16)?]))
            .with_context(|| format!("sending by {device}"))?;
        answers.set_read_timeout(Some(ANSWER))?;
        Ok(Self { frames, answers, from, to })
    }

    /// Sends copies of a packet, whose own source, destination port and sequence number are not
    /// used. Returns the number that the device accepted.
    pub fn flood(&self, packet: Packet, copies: impl IntoIterator<Item = Variation>) -> Result<u64> {
        let template = Template::new(&packet.macs(self.from.mac(), self.to.mac()));
        let mut frames = vec![Vec::new(); BATCH];
        let mut copies = copies.into_iter();
        let (mut sent, mut asked) = (0, 0);
        loop {
            let mut filled = 0;
            for (frame, copy) in frames.iter_mut().zip(&mut copies) {
                template.write(&copy, frame);
                filled += 1;
            }
            if filled == 0 {
                self.hear(&mut asked, 1)?;
                return Ok(sent);
            }
            self.hear(&mut asked, AHEAD)?;
            sent += self.send(&mut frames[..filled])?;
            asked += self.send(&mut [self.question()])?;
        }
    }

    /// An ARP request for the host's MAC address (RFC 826).
    fn question(&self) -> Vec<u8> {
        let (from, to) = (self.from, self.to);
        [
            &to.mac()[..],
            &from.mac(),
            &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1],
            &from.mac(),
            &from.v4.octets(),
            &[0; 6],
            &to.v4.octets(),
        ]
        .concat()
    }

    /// Waits until fewer than `fewer_than` requests are outstanding. A request that remains
    /// unanswered for long was lost, as the others were then.
    fn hear(&self, asked: &mut u64, fewer_than: u64) -> Result<()> {
        let mut frame = [0; 64];
        while *asked >= fewer_than {
            match (&self.answers).read(&mut frame) {
                Ok(42..) if frame[20..22] == [0, 2] && frame[28..32] == self.to.v4.octets() => *asked -= 1,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => *asked = 0,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("hearing answers"),
            }
        }
        Ok(())
    }

    fn send(&self, frames: &mut [Vec<u8>]) -> Result<u64> {
        let mut parts = [const { MaybeUninit::<libc::iovec>::uninit() }; BATCH];
        let mut messages = [const { MaybeUninit::<libc::mmsghdr>::zeroed() }; BATCH];
        for ((frame, part), message) in frames.iter_mut().zip(&mut parts).zip(&mut messages) {
            let part = part.write(libc::iovec { iov_base: frame.as_mut_ptr().cast(), iov_len: frame.len() });
            // SAFETY: all zeros are a valid, empty header.
            let header = unsafe { &mut message.assume_init_mut().msg_hdr };
            (header.msg_iov, header.msg_iovlen) = (ptr::from_mut(part), 1);
        }
        let (mut done, mut sent) = (0, 0);
        while done < frames.len() {
            let rest = &mut messages[done..frames.len()];
            // SAFETY: each header names one part, which names a frame; all outlive the call.
            let result = unsafe {
                let count = rest.len() as libc::c_uint;
                libc::sendmmsg(self.frames.as_raw_fd(), rest.as_mut_ptr().cast(), count, 0)
            };
            match usize::try_from(result) {
                Ok(taken) => {
                    done += taken;
                    sent += taken as u64;
                }
                Err(_) => match io::Error::last_os_error() {
                    // The queue is full all the same: this frame is lost.
                    error if error.raw_os_error() == Some(libc::ENOBUFS) => done += 1,
                    error if error.kind() == io::ErrorKind::Interrupted => {}
                    error => return Err(error).context("sending frames"),
                },
            }
        }
        Ok(sent)
    }
}

/// Sends one frame by a device of the calling thread's namespace.
pub fn send_frame(device: &str, frame: &[u8]) -> Result<()> {
    open(device, 0)?.send(frame).context("sending a frame")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::packet::flag;

    #[test]
    fn a_copy_is_the_packet() {
        for family in Family::BOTH {
            let destination = match family {
                Family::V4 => IpAddr::from([172, 18, 0, 11]),
                Family::V6 => IpAddr::from([0xfd00, 0x172, 0x18, 0, 0, 0, 0, 0x11]),
            };
            let other = stranger(family, 1);
            let tcp = Packet::tcp((other, 1), (destination, 1), flag::SYN);
            let udp = Packet::udp((other, 1), (destination, 1));
            for number in (0..70_000).step_by(7) {
                let source = (stranger(family, number), (number % 65_521) as u16);
                let copy =
                    Variation { source, destination_port: 30_080, sequence: number.wrapping_mul(77_777) };
                let mut frame = Vec::new();
                for packet in [&tcp, &udp] {
                    let mut wanted = packet.clone().source(source).destination((destination, 30_080));
                    if let Transport::Tcp(tcp) = &mut wanted.transport {
                        tcp.sequence = copy.sequence;
                    }
                    Template::new(packet).write(&copy, &mut frame);
                    assert_eq!(frame, wanted.bytes(), "{copy:?}");
                }
            }
        }
    }

    #[test]
    fn strangers_differ() {
        for family in Family::BOTH {
            let all: BTreeSet<_> = (0..1 << 20).map(|number| stranger(family, number)).collect();
            assert_eq!(all.len(), 1 << 20);
        }
    }
}
