//! What an entry remembers of its TCP or UDP conversation, and how long it may then be idle.

/// The conversation is real: the client answered what the endpoint sent. Also for UDP.
pub const CONFIRMED: u8 = 1;
/// This direction sent a FIN.
pub const FIN: u8 = 2;
/// This direction sent an RST.
pub const RST: u8 = 4;
/// Reply entry: the endpoint answered (SYN-ACK, or any datagram).
pub const ANSWERED: u8 = 8;
/// The endpoint takes no more new flows: a SYN or a datagram chooses anew.
pub const GONE: u8 = 16;
/// The last sweep found both entries idle for too long.
pub const MARKED: u8 = 32;

/// Bits of the flags byte of a TCP header.
pub mod flag {
    pub const FIN: u8 = 1;
    pub const SYN: u8 = 2;
    pub const RST: u8 = 4;
    pub const ACK: u8 = 16;
}

/// Whether a segment opens a connection: SYN without ACK or RST.
#[inline(always)]
pub const fn opens(flags: u8) -> bool {
    flags & (flag::SYN | flag::ACK | flag::RST) == flag::SYN
}

/// The state of an entry after a segment in its direction.
///
/// FIN and RST are only noted. Whoever really sent an RST sends nothing but RSTs after it, so any other segment shows
/// that it was forged or out of window; data after a FIN likewise.
#[inline(always)]
pub const fn after(state: u8, flags: u8, payload: bool) -> u8 {
    if flags & flag::RST != 0 {
        return state | RST;
    }
    let state = state & !RST;
    if flags & flag::FIN != 0 {
        return state | FIN;
    }
    if payload { state & !FIN } else { state }
}

/// Whether a connection with these entries has ended, so that a SYN opens a new one.
#[inline(always)]
pub const fn closing(request: u8, reply: u8) -> bool {
    (request | reply) & RST != 0 || request & reply & FIN != 0
}

/// Idle times after which a flow may go, in jiffies.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Timeouts {
    pub established: u32,
    pub finished: u32,
    pub reset: u32,
    pub unconfirmed: u32,
    pub udp: u32,
    pub udp_answered: u32,
}

impl Timeouts {
    /// The time-out of a flow with these entries.
    #[inline(always)]
    pub const fn of(&self, tcp: bool, request: u8, reply: u8) -> u32 {
        if !tcp {
            return if reply & ANSWERED != 0 { self.udp_answered } else { self.udp };
        }
        if (request | reply) & RST != 0 {
            self.reset
        } else if request & reply & FIN != 0 {
            self.finished
        } else if request & CONFIRMED == 0 {
            self.unconfirmed
        } else {
            self.established
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TIMEOUTS: Timeouts = Timeouts {
        established: 86_400,
        finished: 120,
        reset: 10,
        unconfirmed: 60,
        udp: 30,
        udp_answered: 121,
    };

    #[test]
    fn life_of_a_connection() {
        let (mut request, mut reply) = (0, 0);
        assert_eq!(TIMEOUTS.of(true, request, reply), 60);
        reply |= ANSWERED;
        request |= CONFIRMED;
        reply |= CONFIRMED;
        assert_eq!(TIMEOUTS.of(true, request, reply), 86_400);
        request = after(request, flag::FIN | flag::ACK, false);
        assert!(!closing(request, reply), "half closed is not closed");
        assert_eq!(TIMEOUTS.of(true, request, reply), 86_400);
        request = after(request, flag::ACK, false);
        assert_eq!(request & FIN, FIN, "an ACK of the endpoint's data does not open it again");
        reply = after(reply, flag::FIN | flag::ACK, true);
        assert!(closing(request, reply));
        assert_eq!(TIMEOUTS.of(true, request, reply), 120);
    }

    #[test]
    fn forged_reset_is_undone_by_the_next_segment() {
        let request = after(CONFIRMED, flag::RST, false);
        assert!(closing(request, CONFIRMED));
        assert_eq!(TIMEOUTS.of(true, request, CONFIRMED), 10);
        assert_eq!(after(request, flag::ACK, false), CONFIRMED);
    }

    #[test]
    fn udp_times() {
        assert_eq!(TIMEOUTS.of(false, 0, 0), 30);
        assert_eq!(TIMEOUTS.of(false, 0, ANSWERED), 121);
    }

    #[test]
    fn only_a_bare_syn_opens() {
        assert!(opens(flag::SYN));
        assert!(!opens(flag::SYN | flag::ACK));
        assert!(!opens(flag::SYN | flag::RST));
        assert!(!opens(flag::ACK));
        assert!(!opens(0));
    }

    proptest! {
        /// A segment touches FIN and RST only: it never confirms, nor revives a flow whose endpoint is gone.
        #[test]
        fn segments_touch_fin_and_rst_only(state in any::<u8>(), flags in any::<u8>(), payload in any::<bool>()) {
            prop_assert_eq!(after(state, flags, payload) & !(FIN | RST), state & !(FIN | RST));
        }

        #[test]
        fn last_word_of_a_direction_counts(state in any::<u8>(), flags in any::<u8>()) {
            prop_assert_eq!(after(state, flags | flag::RST, true) & RST, RST);
            prop_assert_eq!(after(state, flags & !flag::RST, true) & RST, 0);
        }
    }
}
