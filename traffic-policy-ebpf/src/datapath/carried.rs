//! What a half's translation can be carried out on: a whole packet here, a later fragment and an ICMP error in files of their
//! own.

use traffic_policy_ebpf::{
    abi::{Flow, kind},
    outcome::Outcome,
};

use crate::datapath::{
    ctx::Packet,
    parse::Parsed,
    rewrite::{self, Rewrite},
    verdict::Exit,
    words::load64,
};

pub trait Carried<P: Packet, F: Rewrite> {
    /// What it is called that a half of this kind was carried out.
    fn outcome(kind: u8) -> Outcome;
    /// First byte of the IP header.
    fn ip(&self) -> usize;
    /// TTL or hop limit.
    fn ttl(&self) -> u8;
    /// Bytes of the longest IP packet that it becomes on the wire.
    fn wire_length(&self, packet: P) -> u32;
    /// What becomes of it if its TTL ends here.
    fn expired(&self) -> Outcome;
    /// What becomes of it if only `mtu` bytes fit the way out.
    fn too_long(&self, mtu: u32) -> Exit;
    /// Counts it in the half.
    fn account(&self, half: *mut Flow<F::Address>, now: u32);
    /// Rewrites it, with a step of the TTL if it is sent on. False: the kernel refused, the packet is spoilt.
    #[must_use]
    fn translate(&self, packet: P, half: *const Flow<F::Address>, step: bool) -> bool;
}

impl<P: Packet, F: Rewrite> Carried<P, F> for Parsed<F> {
    #[inline(always)]
    fn outcome(kind: u8) -> Outcome {
        match kind {
            kind::FORWARD => Outcome::Forwarded,
            kind::DELIVER => Outcome::Delivered,
            kind::REPLY_LOCAL => Outcome::RepliedLocal,
            _ => Outcome::Replied,
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
    fn wire_length(&self, packet: P) -> u32 {
        Parsed::wire_length(self, packet)
    }
    #[inline(always)]
    fn expired(&self) -> Outcome {
        Outcome::RejectedTtlExceeded
    }
    #[inline(always)]
    fn too_long(&self, mtu: u32) -> Exit {
        if !F::V6 && !unfragmentable(self) {
            return Outcome::DroppedMtuExceeded.into();
        }
        Exit { mtu, ..Outcome::RejectedMtuExceeded.into() }
    }
    #[inline(always)]
    fn account(&self, half: *mut Flow<F::Address>, now: u32) {
        account::<F>(half, self.length, now);
    }
    #[inline(always)]
    fn translate(&self, packet: P, half: *const Flow<F::Address>, step: bool) -> bool {
        rewrite::translate(packet, self, half, step)
    }
}

/// The DF bit of IPv4.
#[inline(always)]
fn unfragmentable<F: Rewrite>(parsed: &Parsed<F>) -> bool {
    unsafe { load64::<0>(parsed.ip) }.to_ne_bytes()[6] & 0x40 != 0
}

/// Counts a packet of `length` bytes in its half.
#[inline(always)]
pub fn account<F: Rewrite>(half: *mut Flow<F::Address>, length: u32, now: u32) {
    unsafe {
        (*half).packets += 1;
        (*half).bytes += length as u64;
        if (*half).last != now {
            (*half).last = now;
        }
    }
}
