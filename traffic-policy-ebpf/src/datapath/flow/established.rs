//! Packets of established flows, which need nothing but their translation: how one is recognised,
//! and what it leaves in its entry.

use traffic_policy_ebpf::{
    abi::{Address, Flow, Window},
    tcp::{ANSWERED, ASSURED, flag, numbers},
};

use crate::datapath::{
    family::Family,
    parse::Parsed,
    words::{load16, load64},
};

/// Whether the flow is established: assured, open, endpoint not removed. Its packets need nothing
/// but their translation, if they [continue][advance] it.
#[inline(always)]
pub fn is_established(state: u8, tcp_flags: u8) -> bool {
    state & !ANSWERED == ASSURED && tcp_flags & (flag::SYN | flag::FIN | flag::RST) == 0
}

/// Returns sequence and acknowledgement number of a TCP segment; 0 for other protocols.
#[inline(always)]
pub fn numbers_of<F: Family>(parsed: &Parsed<F>) -> u64 {
    if parsed.is_tcp() { u64::from_be(load64::<4>(parsed.l4)) } else { 0 }
}

/// Returns the window that a TCP segment offers; none for UDP. It must not be used for a SYN, whose
/// window is never scaled (RFC 7323 section 2.2).
#[inline(always)]
pub fn window_of<F: Family>(parsed: &Parsed<F>) -> Window {
    if parsed.is_tcp() { Window::of(u16::from_be(load16::<14>(parsed.l4))) } else { Window::NONE }
}

/// Notes numbers and window of an established flow's packet, those of [`numbers_of`] and
/// [`window_of`]. False: they do not simply continue it. For UDP all are 0.
///
/// The window is read only from the first packet of each jiffy: the largest one decides, and hosts
/// that move much data offer theirs again and again.
#[inline(always)]
pub fn advance<F: Family>(entry: *mut Flow<F::Address>, parsed: &Parsed<F>, numbers: u64, now: u32) -> bool {
    let continues = numbers::continues(numbers, get!(entry.numbers));
    if continues {
        set!(entry.numbers = numbers);
        if get!(entry.last) != now {
            note_window(entry, window_of(parsed));
        }
    }
    continues
}

/// Notes the window of a segment that belongs to the flow.
#[inline(always)]
pub fn note_window<A: Address>(entry: *mut Flow<A>, window: Window) {
    let packets = get!(entry.packets);
    if packets.is_below(window) {
        set!(entry.packets = packets.with_window(window));
    }
}
