//! ICMP errors about packets of flows. An error quotes the packet that it is about, and goes back to who sent that packet:
//! outside and inside become what the receiver knows, as packets of the opposite direction do. The flow itself stays as
//! it is: anybody can send an error.

use traffic_policy_ebpf::{
    abi::{Address, Flow, PROTOCOL_TCP, PROTOCOL_UDP, Tuple, hook, kind},
    checksum::{self, TTL_STEP},
    outcome::Outcome,
};

use crate::datapath::{
    barrier::opaque,
    clock,
    ctx::Packet,
    egress, extension,
    family::{V4, V6},
    flow::{state, table},
    forward::{self, Carried, Rewrite, nexthop},
    parse::{self, ETHERNET},
    verdict::{self, Exit},
    words::{load8, load16, load32, load64, store8, store16, store32, store64},
};

const ICMP: usize = 8;
/// What is read of an error: both IP headers at their longest, the ICMP header, and a quoted TCP header up to its checksum.
const REACH4: usize = ETHERNET + 60 + ICMP + 60 + 18;
const REACH6: usize = ETHERNET + 40 + ICMP + extension::REACH + 18;

/// An ICMP error, and the packet that it quotes.
pub struct Quoting<F: Rewrite> {
    /// What packets of the error's direction have: the quoted packet's tuple, reversed.
    tuple: Tuple<F::Address>,
    ip: usize,
    icmp: usize,
    /// The quoted IP header, and the transport header after it.
    quoted: usize,
    l4: usize,
    /// Whether the quoted packet is TCP, see [`parse::is_tcp`], and reaches to the checksum.
    tcp: u64,
    tcp_sum: u64,
    /// Bytes of the IP packet.
    length: u32,
    ttl: u8,
}

/// A family whose ICMP errors can be read and rewritten.
pub trait Quote: Rewrite {
    /// # Errors
    /// How the packet passes, if it is no error about a TCP segment or datagram, or is cut too short to tell.
    fn quoting<P: Packet>(packet: P) -> Result<Quoting<Self>, Outcome>;
    /// Addresses of the IP header at `ip`.
    ///
    /// # Safety
    /// The header has been compared with the end of the packet, here and below.
    unsafe fn addresses_at(ip: usize) -> (Self::Address, Self::Address);
    /// Writes them.
    ///
    /// # Safety
    /// As above.
    unsafe fn set_addresses(ip: usize, source: Self::Address, destination: Self::Address);
    /// Completes the IP header at `ip` after a change of its addresses by `delta`, with a step of the TTL or without.
    /// Returns the delta of the whole header but for the addresses.
    ///
    /// # Safety
    /// As above.
    unsafe fn complete(ip: usize, delta: u16, step: bool) -> u16;
}

/// The program for errors that come in.
#[inline(always)]
pub fn run<P: Packet, F: Quote>(packet: P) -> i32 {
    verdict::leave(packet, P::HOOK, incoming::<P, F>(packet))
}

#[inline(always)]
fn incoming<P: Packet, F: Quote>(packet: P) -> Exit {
    let quoting = match F::quoting(packet) {
        Ok(quoting) => quoting,
        Err(outcome) => return outcome.into(),
    };
    let half = match half(&quoting) {
        Ok(half) => half,
        Err(outcome) => return outcome.into(),
    };
    if !matches!(unsafe { (*half).kind }, kind::FORWARD | kind::REPLY | kind::DELIVER) {
        return Outcome::PassedStaleFlow.into();
    }
    let now = clock::jiffies();
    match nexthop::way_out::<P, F>(packet, half, now) {
        Ok(ready) => forward::carry_out(packet, &quoting, &ready, now),
        Err(exit) => exit,
    }
}

/// The program for errors that leave this node: of its own stack, which knows only the translated packet, or of an endpoint.
#[inline(always)]
pub fn run_out<P: Packet, F: Quote>(packet: P) -> i32 {
    verdict::leave(packet, hook::EGRESS, outgoing::<P, F>(packet).into())
}

#[inline(always)]
fn outgoing<P: Packet, F: Quote>(packet: P) -> Outcome {
    let quoting = match F::quoting(packet) {
        Ok(quoting) => quoting,
        Err(outcome) => return outcome,
    };
    let half = match half(&quoting) {
        Ok(half) => half,
        Err(outcome) => return outcome,
    };
    egress::translate(packet, &quoting, half)
}

/// The half that translates packets of the error's direction.
#[inline(always)]
fn half<F: Quote>(quoting: &Quoting<F>) -> Result<*mut Flow<F::Address>, Outcome> {
    let (half, pending) = table::find::<F>(&quoting.tuple);
    if half.is_null() {
        return Err(Outcome::PassedIcmpNoFlow);
    }
    // In `PENDING` half a flow may be left, which says no more whose it is.
    if pending && !state::whole::<F>(half, &quoting.tuple, pending) {
        return Err(Outcome::PassedStaleFlow);
    }
    // Only whom the quoted packet came from may be told of it, as in nf_conntrack_inet_error:
    // <https://github.com/torvalds/linux/blob/v6.12/net/netfilter/nf_conntrack_proto_icmp.c>
    if unsafe { F::addresses_at(quoting.ip) }.1 != quoting.tuple.destination {
        return Err(Outcome::PassedIcmpNoFlow);
    }
    Ok(half)
}

impl<P: Packet, F: Quote> Carried<P, F> for Quoting<F> {
    #[inline(always)]
    fn outcome(kind: u8) -> Outcome {
        match kind {
            kind::FORWARD => Outcome::ForwardedIcmpError,
            kind::DELIVER => Outcome::DeliveredIcmpError,
            kind::REPLY_LOCAL => Outcome::RepliedLocalIcmpError,
            _ => Outcome::RepliedIcmpError,
        }
    }
    #[inline(always)]
    fn ip(&self) -> usize {
        self.ip
    }
    #[inline(always)]
    fn ttl(&self) -> u8 {
        self.ttl
    }
    #[inline(always)]
    fn wire_length(&self, _: P) -> u32 {
        self.length
    }
    #[inline(always)]
    fn expired(&self) -> Outcome {
        Outcome::DroppedTtlExceeded
    }
    #[inline(always)]
    fn too_long(&self, _: u32) -> Exit {
        Outcome::DroppedMtuExceeded.into()
    }
    #[inline(always)]
    fn account(&self, _: *mut Flow<F::Address>, _: u32) {}

    /// Plain stores in TC, too: the ICMP checksum covers all that changes but for the outer header of IPv4, which has its
    /// own. So the sum over the frame stays as a device may have computed it.
    #[inline(always)]
    fn translate(&self, packet: P, half: *const Flow<F::Address>, step: bool) -> bool {
        unsafe {
            let (source, destination) = ((*half).source, (*half).destination);
            let (was_source, was_destination) = F::addresses_at(self.ip);
            // As netfilter does: where the half changes the source of packets, it changes that of errors too, whoever has
            // sent them; a client sees nothing behind the frontend. An endpoint of this node, which knows its clients,
            // sees which router it was.
            // <https://github.com/torvalds/linux/blob/v6.12/net/netfilter/nf_nat_proto.c> nf_nat_icmp_reply_translation
            let outer_source = if source == self.tuple.source { was_source } else { source };
            F::set_addresses(self.ip, outer_source, destination);
            let outer = checksum::delta(
                was_source.sum() + was_destination.sum(),
                outer_source.sum() + destination.sum(),
            );
            F::complete(self.ip, outer, step);

            let (addresses, ports) = ((*half).address_delta, (*half).port_delta);
            F::set_addresses(self.quoted, destination, source);
            let mut delta = checksum::add(addresses, ports);
            let both = delta;
            delta = checksum::add(delta, F::complete(self.quoted, addresses, false));
            store32::<0>(self.l4, (*half).ports.rotate_left(16));
            if self.tcp == 0 {
                let was = load16::<6>(self.l4);
                let sum = checksum::update_udp(was, both);
                store16::<6>(self.l4, sum);
                delta = checksum::add(delta, checksum::delta(was as u64, sum as u64));
            } else if self.tcp_sum != 0 && self.l4 + 18 <= packet.end() {
                let was = load16::<16>(self.l4);
                let sum = checksum::update(was, both);
                store16::<16>(self.l4, sum);
                delta = checksum::add(delta, checksum::delta(was as u64, sum as u64));
            }
            if F::V6 {
                delta = checksum::add(delta, outer);
            }
            store16::<2>(self.icmp, checksum::update(load16::<2>(self.icmp), delta));
        }
        true
    }
}

impl Quote for V4 {
    #[inline(always)]
    fn quoting<P: Packet>(packet: P) -> Result<Quoting<Self>, Outcome> {
        packet.reach(REACH4 as u32);
        let (data, end) = (packet.data(), packet.end());
        let ip = data + ETHERNET;
        if ip + 20 > end {
            return Err(Outcome::PassedMalformed);
        }
        unsafe {
            let first = load8::<0>(ip);
            let header = opaque((first as u64 & 15) << 2) as usize;
            let length = u16::from_be(load16::<2>(ip)) as u32;
            if !matches!(first, 0x45..=0x4f) || length > packet.length() - ETHERNET as u32 {
                return Err(Outcome::PassedMalformed);
            }
            let icmp = ip + header;
            let quoted = icmp + ICMP;
            if quoted + 20 > end {
                return Err(Outcome::PassedMalformed);
            }
            let first = load8::<0>(quoted);
            let inner = opaque((first as u64 & 15) << 2) as usize;
            let protocol = load8::<9>(quoted) as u32;
            // The ports are in the first fragment only.
            if first >> 4 != 4
                || inner < 20
                || protocol != PROTOCOL_TCP && protocol != PROTOCOL_UDP
                || load16::<6>(quoted) & 0x1fffu16.to_be() != 0
            {
                return Err(Outcome::PassedIcmpNoFlow);
            }
            let l4 = quoted + inner;
            let at = (header + ICMP + inner) as u32;
            // RFC 792: at least eight bytes.
            if l4 + 8 > end || at + 8 > length {
                return Err(Outcome::PassedMalformed);
            }
            let tuple = Tuple {
                source: load32::<16>(quoted),
                destination: load32::<12>(quoted),
                ports: load32::<0>(l4).rotate_left(16),
                protocol,
            };
            let tcp_sum = (at + 18 <= length) as u64;
            let ttl = load8::<8>(ip);
            Ok(Quoting { tuple, ip, icmp, quoted, l4, tcp: parse::is_tcp(protocol), tcp_sum, length, ttl })
        }
    }

    #[inline(always)]
    unsafe fn addresses_at(ip: usize) -> (u32, u32) {
        unsafe { (load32::<12>(ip), load32::<16>(ip)) }
    }

    #[inline(always)]
    unsafe fn set_addresses(ip: usize, source: u32, destination: u32) {
        unsafe {
            store32::<12>(ip, source);
            store32::<16>(ip, destination);
        }
    }

    #[inline(always)]
    unsafe fn complete(ip: usize, delta: u16, step: bool) -> u16 {
        unsafe {
            let mut rest = 0;
            if step {
                store8::<8>(ip, load8::<8>(ip) - 1);
                rest = TTL_STEP;
            }
            let was = load16::<10>(ip);
            let sum = checksum::update(was, checksum::add(delta, rest));
            store16::<10>(ip, sum);
            checksum::add(rest, checksum::delta(was as u64, sum as u64))
        }
    }
}

impl Quote for V6 {
    #[inline(always)]
    fn quoting<P: Packet>(packet: P) -> Result<Quoting<Self>, Outcome> {
        packet.reach(REACH6 as u32);
        let (data, end) = (packet.data(), packet.end());
        let ip = data + ETHERNET;
        let icmp = ip + 40;
        let quoted = icmp + ICMP;
        if quoted + 40 > end {
            return Err(Outcome::PassedMalformed);
        }
        unsafe {
            let length = u16::from_be(load16::<4>(ip)) as u32 + 40;
            if length > packet.length() - ETHERNET as u32 {
                return Err(Outcome::PassedMalformed);
            }
            if load8::<0>(quoted) >> 4 != 6 {
                return Err(Outcome::PassedIcmpNoFlow);
            }
            let walked = match extension::walk(quoted, end) {
                Ok(walked) if walked.fragment & extension::OFFSET == 0 => walked,
                Err(Outcome::PassedMalformed) => return Err(Outcome::PassedMalformed),
                _ => return Err(Outcome::PassedIcmpNoFlow),
            };
            let l4 = opaque((quoted + walked.offset as usize) as u64) as usize;
            let at = (40 + ICMP) as u32 + walked.offset;
            if l4 + 8 > end || at + 8 > length {
                return Err(Outcome::PassedMalformed);
            }
            let tuple = Tuple {
                source: [load64::<24>(quoted), load64::<32>(quoted)],
                destination: [load64::<8>(quoted), load64::<16>(quoted)],
                ports: load32::<0>(l4).rotate_left(16),
                protocol: walked.protocol,
            };
            let tcp_sum = (at + 18 <= length) as u64;
            let ttl = load8::<7>(ip);
            let tcp = parse::is_tcp(walked.protocol);
            Ok(Quoting { tuple, ip, icmp, quoted, l4, tcp, tcp_sum, length, ttl })
        }
    }

    #[inline(always)]
    unsafe fn addresses_at(ip: usize) -> ([u64; 2], [u64; 2]) {
        unsafe { ([load64::<8>(ip), load64::<16>(ip)], [load64::<24>(ip), load64::<32>(ip)]) }
    }

    #[inline(always)]
    unsafe fn set_addresses(ip: usize, source: [u64; 2], destination: [u64; 2]) {
        unsafe {
            store64::<8>(ip, source[0]);
            store64::<16>(ip, source[1]);
            store64::<24>(ip, destination[0]);
            store64::<32>(ip, destination[1]);
        }
    }

    #[inline(always)]
    unsafe fn complete(ip: usize, _: u16, step: bool) -> u16 {
        if step {
            unsafe { store8::<7>(ip, load8::<7>(ip) - 1) };
        }
        0
    }
}
