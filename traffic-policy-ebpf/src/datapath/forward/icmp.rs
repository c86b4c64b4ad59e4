//! Translation of an ICMP error. An error quotes the packet that it is about, and is sent to that
//! packet's sender. The outer and the quoted header are translated to what the receiver knows, as
//! for packets of the opposite direction.

use traffic_policy_ebpf::{
    abi::{Address, Address4, Address6, Flow, PROTOCOL_SCTP, kind},
    checksum::{self, TTL_STEP},
    outcome::Outcome,
};

use crate::datapath::{
    ctx::Packet,
    family::{V4, V6},
    forward::{Rewrite, Translatable},
    parse::icmp_error::{IcmpError, ParseIcmpError},
    verdict::Decision,
    words::{load8, load16, store8, store16, store32, store64},
};

/// A family whose ICMP errors can be rewritten.
pub trait RewriteIcmpError: ParseIcmpError + Rewrite {
    /// Writes the addresses of the IP header at `ip`.
    fn set_addresses(ip: usize, source: Self::Address, destination: Self::Address);
    /// Completes the IP header at `ip` after a change of its addresses by `delta`, decrementing the
    /// TTL if `step`. Returns the delta of the whole header except for the addresses.
    fn complete(ip: usize, delta: u16, step: bool) -> u16;
}

impl<P: Packet, F: RewriteIcmpError> Translatable<P, F> for IcmpError<F> {
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
    fn outcome_of_direct() -> Outcome {
        Outcome::ForwardedIcmpError
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
    fn ttl_exceeded(&self) -> Outcome {
        Outcome::DroppedTtlExceeded
    }
    #[inline(always)]
    fn mtu_exceeded(&self, _: u32) -> Decision {
        Outcome::DroppedMtuExceeded.into()
    }
    #[inline(always)]
    fn account(&self, _: *mut Flow<F::Address>, _: u32) {}

    /// Plain stores suffice in TC, too: the ICMP checksum covers all changes except for the outer
    /// IPv4 header, which has its own. So the sum over the frame stays as a device may have
    /// computed it.
    #[inline(always)]
    fn translate(&self, packet: P, entry: *const Flow<F::Address>, step: bool) -> bool {
        let (source, destination) = (get!(entry.source), get!(entry.destination));
        let (was_source, was_destination) = F::addresses_at(self.ip);
        // The same as in netfilter: where the entry changes the source of packets, it also changes
        // that of errors, whatever their sender; a client sees nothing behind the frontend. An
        // endpoint of this node, which sees its clients' addresses, also sees which router sent the
        // error. <https://github.com/torvalds/linux/blob/v6.12/net/netfilter/nf_nat_proto.c>
        // nf_nat_icmp_reply_translation
        let outer_source = if source == self.tuple.source { was_source } else { source };
        F::set_addresses(self.ip, outer_source, destination);
        let outer =
            checksum::delta(was_source.sum() + was_destination.sum(), outer_source.sum() + destination.sum());
        F::complete(self.ip, outer, step);

        let (addresses, ports) = (get!(entry.address_delta), get!(entry.port_delta));
        F::set_addresses(self.quoted, destination, source);
        let mut delta = checksum::add(addresses, ports);
        let both = delta;
        delta = checksum::add(delta, F::complete(self.quoted, addresses, false));
        store32::<0>(self.l4, get!(entry.ports).reversed().wire());
        if self.tuple.protocol == PROTOCOL_SCTP {
            // The quoted CRC stays unchanged: hosts check only ports and tag of a quoted packet
            // (RFC 9260 section 10).
        } else if self.tcp == 0 {
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
        true
    }
}

impl RewriteIcmpError for V4 {
    #[inline(always)]
    fn set_addresses(ip: usize, source: Address4, destination: Address4) {
        store32::<12>(ip, source.wire());
        store32::<16>(ip, destination.wire());
    }

    #[inline(always)]
    fn complete(ip: usize, delta: u16, step: bool) -> u16 {
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

impl RewriteIcmpError for V6 {
    #[inline(always)]
    fn set_addresses(ip: usize, source: Address6, destination: Address6) {
        let (source, destination) = (source.wire(), destination.wire());
        store64::<8>(ip, source[0]);
        store64::<16>(ip, source[1]);
        store64::<24>(ip, destination[0]);
        store64::<32>(ip, destination[1]);
    }

    #[inline(always)]
    fn complete(ip: usize, _: u16, step: bool) -> u16 {
        if step {
            store8::<7>(ip, load8::<7>(ip) - 1);
        }
        0
    }
}
