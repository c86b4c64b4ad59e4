//! The packets in which the entry programs find no ports where they look for them: ICMP errors, which have a file of their
//! own, and fragments and packets with IPv4 options or IPv6 extension headers, read here.

use traffic_policy_ebpf::{
    abi::{PROTOCOL_TCP, PROTOCOL_UDP, Tuple, hook, jump, kind},
    outcome::Outcome,
};

use crate::datapath::{
    barrier::opaque,
    clock,
    ctx::Packet,
    egress,
    extension::{self, MORE, OFFSET},
    family::{V4, V6},
    forward::{self, Rewrite, nexthop},
    fragment,
    maps::{FRAGMENTS4, FRAGMENTS6, Table},
    parse::{self, ETHERNET, Parse, Parsed},
    prefilter::{self, Ours},
    reject, slow_path,
    verdict::{self, Exit},
    words::{load8, load16, load32, load64},
};

/// Hands an irregular packet, coming in or going out, to the program that can read it. What is neither an ICMP error, nor a
/// fragment, nor behind extension headers goes no further.
#[inline(always)]
pub fn hand_over<P: Packet, F: Parse, const OUT: bool>(packet: P, outcome: Outcome) -> Exit {
    match outcome {
        Outcome::PassedFragment | Outcome::PassedUnsupportedHeader if OUT => {
            packet.jump::<F, { jump::IRREGULAR_OUT }>();
        }
        Outcome::PassedFragment | Outcome::PassedUnsupportedHeader => packet.jump::<F, { jump::IRREGULAR }>(),
        Outcome::PassedUnsupportedProtocol if F::is_error(packet) => {
            if OUT {
                packet.jump::<F, { jump::ERROR_OUT }>();
            } else {
                packet.jump::<F, { jump::ERROR }>();
            }
        }
        _ => return outcome.into(),
    }
    Outcome::PassedMissedTailCall.into()
}

/// A packet as it lies there. Of a later fragment, ports are not known and the transport header is not to be touched.
pub struct Laid<F: Rewrite> {
    pub parsed: Parsed<F>,
    /// 1 for a fragment, first or later: see [`opaque`].
    pub fragmented: u64,
    /// 1 for a later fragment.
    pub later: u64,
    /// Memory order.
    pub identification: u32,
}

/// A family whose irregular packets can be read.
pub trait Irregular: Rewrite {
    /// # Errors
    /// How it passes.
    fn laid<P: Packet>(packet: P) -> Result<Laid<Self>, Outcome>;
    /// The records of first fragments.
    fn fragments() -> Table;
}

/// The program for packets that come in.
#[inline(always)]
pub fn run<P: Packet, F: Irregular>(packet: P) -> i32 {
    verdict::leave(packet, P::HOOK, incoming::<P, F>(packet))
}

#[inline(always)]
fn incoming<P: Packet, F: Irregular>(packet: P) -> Exit {
    let laid = match F::laid(packet) {
        Ok(laid) => laid,
        Err(outcome) => return outcome.into(),
    };
    if !fragment::note(&laid) {
        return Outcome::DroppedInternalError.into();
    }
    let now = clock::jiffies();
    if laid.later != 0 {
        let (later, half) = match fragment::later(laid) {
            Ok(found) => found,
            Err(outcome) => return outcome.into(),
        };
        if !matches!(unsafe { (*half).kind }, kind::FORWARD | kind::REPLY | kind::DELIVER) {
            return Outcome::PassedStaleFlow.into();
        }
        let exit = match nexthop::way_out::<P, F>(packet, half, now) {
            Ok(ready) => forward::carry_out(packet, &later, &ready, now),
            Err(exit) => exit,
        };
        return reject::if_refused::<P, F>(
            packet,
            &later.parsed,
            Exit { service: unsafe { (*half).service }, ..exit },
        );
    }
    let parsed = laid.parsed;
    if matches!(prefilter::ours::<F>(&parsed.tuple), Ours::No) {
        return Outcome::Passed.into();
    }
    if parsed.is_tcp() && parsed.l4 + 20 > packet.end() {
        return Outcome::PassedMalformed.into();
    }
    if let Err(outcome) = parse::finish(packet, &parsed) {
        return outcome.into();
    }
    let prepared = slow_path::prepare(packet, &parsed, now);
    // Also where TC has to send it: the next fragment may be here before it has come there.
    let known = match &prepared {
        Ok(_) => true,
        Err(exit) => exit.outcome as u32 == Outcome::PassedToTc as u32,
    };
    if known {
        fragment::record(&parsed);
    }
    let exit = match prepared {
        Ok(ready) => {
            let exit = forward::carry_out(packet, &parsed, &ready, now);
            Exit { service: unsafe { (*ready.half).service }, ..exit }
        }
        Err(exit) => exit,
    };
    reject::if_refused::<P, F>(packet, &parsed, exit)
}

/// The program for packets that leave.
#[inline(always)]
pub fn run_out<P: Packet, F: Irregular>(packet: P) -> i32 {
    verdict::leave(packet, hook::EGRESS, outgoing::<P, F>(packet).into())
}

#[inline(always)]
fn outgoing<P: Packet, F: Irregular>(packet: P) -> Outcome {
    let laid = match F::laid(packet) {
        Ok(laid) => laid,
        Err(outcome) => return outcome,
    };
    if !fragment::note(&laid) {
        return Outcome::DroppedInternalError;
    }
    if laid.later != 0 {
        let (later, half) = match fragment::later(laid) {
            Ok(found) => found,
            Err(outcome) => return outcome,
        };
        return egress::translate(packet, &later, half);
    }
    let parsed = &laid.parsed;
    if parsed.is_tcp() && parsed.l4 + 20 > packet.end() {
        return Outcome::PassedMalformed;
    }
    let outcome = egress::reply(packet, &laid.parsed);
    if outcome as u32 == Outcome::RepliedLocal as u32 {
        fragment::record(&laid.parsed);
    }
    outcome
}

impl Irregular for V4 {
    #[inline(always)]
    fn laid<P: Packet>(packet: P) -> Result<Laid<Self>, Outcome> {
        let (ip, end) = (packet.data() + ETHERNET, packet.end());
        if ip + 20 > end {
            return Err(Outcome::PassedMalformed);
        }
        unsafe {
            let first = load8::<0>(ip);
            if !matches!(first, 0x45..=0x4f) {
                return Err(Outcome::PassedMalformed);
            }
            let header = opaque((first as u64 & 15) << 2) as usize;
            let protocol = load8::<9>(ip) as u32;
            let length = u16::from_be(load16::<2>(ip)) as u32;
            if protocol != PROTOCOL_TCP && protocol != PROTOCOL_UDP {
                return Err(Outcome::PassedFragment);
            }
            if length <= header as u32 || length > packet.length() - ETHERNET as u32 {
                return Err(Outcome::PassedMalformed);
            }
            // The fields of RFC 791 section 3.1 in the places of those of IPv6.
            let word = u16::from_be(load16::<6>(ip)) as u32;
            let fragment = (word & 0x1fff) << 3 | (word >> 13) & MORE;
            let l4 = ip + header;
            let later = opaque((fragment & OFFSET != 0) as u64);
            if later == 0 && l4 + 8 > end {
                return Err(Outcome::PassedMalformed);
            }
            let tuple = Tuple {
                source: load32::<12>(ip),
                destination: load32::<16>(ip),
                ports: if later != 0 { 0 } else { load32::<0>(l4) },
                protocol,
            };
            let parsed = Parsed {
                tuple,
                ip,
                l4,
                l4_offset: (ETHERNET + header) as u32,
                length,
                ttl: load8::<8>(ip),
                tcp: parse::is_tcp(protocol),
            };
            let fragmented = opaque((fragment != 0) as u64);
            Ok(Laid { parsed, fragmented, later, identification: load16::<4>(ip) as u32 })
        }
    }

    #[inline(always)]
    fn fragments() -> Table {
        Table::of(&raw const FRAGMENTS4)
    }
}

impl Irregular for V6 {
    #[inline(always)]
    fn laid<P: Packet>(packet: P) -> Result<Laid<Self>, Outcome> {
        packet.reach((ETHERNET + extension::REACH + 20) as u32);
        let (ip, end) = (packet.data() + ETHERNET, packet.end());
        if ip + 40 > end {
            return Err(Outcome::PassedMalformed);
        }
        unsafe {
            let walked = extension::walk(ip, end)?;
            let (ip, end) = (packet.data() + ETHERNET, packet.end());
            if ip + 40 > end {
                return Err(Outcome::PassedMalformed);
            }
            let length = u16::from_be(load16::<4>(ip)) as u32 + 40;
            if length > packet.length() - ETHERNET as u32 {
                return Err(Outcome::PassedMalformed);
            }
            let l4 = opaque((ip + walked.offset as usize) as u64) as usize;
            let later = opaque((walked.fragment & OFFSET != 0) as u64);
            if later == 0 && l4 + 8 > end {
                return Err(Outcome::PassedMalformed);
            }
            let tuple = Tuple {
                source: [load64::<8>(ip), load64::<16>(ip)],
                destination: [load64::<24>(ip), load64::<32>(ip)],
                ports: if later != 0 { 0 } else { load32::<0>(l4) },
                protocol: walked.protocol,
            };
            let parsed = Parsed {
                tuple,
                ip,
                l4,
                l4_offset: ETHERNET as u32 + walked.offset,
                length,
                ttl: load8::<7>(ip),
                tcp: parse::is_tcp(walked.protocol),
            };
            let fragmented = opaque((walked.fragment != 0) as u64);
            Ok(Laid { parsed, fragmented, later, identification: walked.identification })
        }
    }

    #[inline(always)]
    fn fragments() -> Table {
        Table::of(&raw const FRAGMENTS6)
    }
}
