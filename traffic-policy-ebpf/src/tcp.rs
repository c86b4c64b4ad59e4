//! The TCP and UDP state of a flow entry, and its idle time-outs. [`crate::sctp`] uses the same
//! bits.

pub mod numbers;

/// The flow is not removed to make room for another one: IPS_ASSURED of conntrack. TCP sets it by
/// the ACK of the SYN-ACK, UDP by a datagram of either side more than two seconds after the first,
/// once there was an answer.
pub const ASSURED: u8 = 1;
/// This direction sent a FIN.
pub const FIN: u8 = 2;
/// This direction sent an RST.
pub const RST: u8 = 4;
/// Reply entry: the endpoint answered (SYN-ACK, or any datagram). IPS_SEEN_REPLY of conntrack.
pub const ANSWERED: u8 = 8;
/// The endpoint was removed and takes no more new flows: a SYN or a datagram chooses a new one.
pub const REMOVED: u8 = 16;
/// The last sweep found both entries idle for too long.
pub const MARKED: u8 = 32;
/// A flag of both entries: the packets of this flow's client look like another flow's once they are
/// delivered, so XDP leaves them to TC.
pub const BY_TC: u8 = 64;
/// Request entry of an endpoint on this node: its replies go back through the node in front, see
/// [`WayBack`][crate::abi::WayBack]. No packet of such a flow is one for the fast path.
pub const TUNNELLED: u8 = 128;

/// Bits of the flags byte of a TCP header.
pub mod flag {
    pub const FIN: u8 = 1;
    pub const SYN: u8 = 2;
    pub const RST: u8 = 4;
    pub const ACK: u8 = 16;
}

/// Whether a segment opens a connection: SYN without ACK, RST or FIN. A SYN with FIN is invalid
/// (conntrack's `tcp_valid_flags`).
#[inline(always)]
pub const fn opens(flags: u8) -> bool {
    flags & (flag::SYN | flag::ACK | flag::RST | flag::FIN) == flag::SYN
}

/// Whether a connection with these entries was reset or closed by both sides. [`numbers::is_over`]
/// tells whether the last data has arrived, and a SYN may open a new one.
#[inline(always)]
pub const fn closing(request: u8, reply: u8) -> bool {
    (request | reply) & RST != 0 || request & reply & FIN != 0
}

/// Classes of flows, in the order in which a table that is nearly full removes them, and their
/// number. An established TCP connection or SCTP association has no class: it is never removed for
/// another flow.
pub mod class {
    /// Closed or reset connections.
    pub const ENDED: usize = 0;
    /// Flows that are not [`ASSURED`][super::ASSURED].
    pub const UNASSURED: usize = 1;
    /// Assured UDP flows: those beyond the share of UDP are removed first, the rest after
    /// [`HALF_CLOSED`].
    pub const UDP: usize = 2;
    pub const HALF_CLOSED: usize = 3;
    pub const COUNT: usize = 4;
}

/// The class of a flow with these states of its entries; [`class::COUNT`] if it is in none. `tcp`:
/// TCP or SCTP.
#[inline(always)]
pub const fn class(tcp: bool, request: u8, reply: u8) -> usize {
    if !tcp {
        return if request & ASSURED != 0 { class::UDP } else { class::UNASSURED };
    }
    if closing(request, reply) {
        class::ENDED
    } else if request & ASSURED == 0 {
        class::UNASSURED
    } else if (request | reply) & FIN != 0 {
        class::HALF_CLOSED
    } else {
        class::COUNT
    }
}

/// The idle times after which a flow may be removed, in jiffies.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Timeouts {
    pub established: u32,
    pub half_closed: u32,
    pub finished: u32,
    pub reset: u32,
    pub unassured: u32,
    pub udp: u32,
    pub udp_answered: u32,
}

impl Timeouts {
    /// The time-out of a flow with these entries.
    #[inline(always)]
    pub const fn of(&self, tcp: bool, request: u8, reply: u8) -> u32 {
        if !tcp {
            return if request & ASSURED != 0 { self.udp_answered } else { self.udp };
        }
        if (request | reply) & RST != 0 {
            self.reset
        } else if request & reply & FIN != 0 {
            self.finished
        } else if request & ASSURED == 0 {
            self.unassured
        } else if (request | reply) & FIN != 0 {
            self.half_closed
        } else {
            self.established
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Times that all differ. The tests of [`crate::sctp`] use them, too.
    pub(crate) const TIMEOUTS: Timeouts = Timeouts {
        established: 86_400,
        half_closed: 3_600,
        finished: 120,
        reset: 10,
        unassured: 60,
        udp: 30,
        udp_answered: 121,
    };

    #[test]
    fn life_of_a_connection() {
        assert_eq!(TIMEOUTS.of(true, 0, 0), 60);
        assert_eq!(TIMEOUTS.of(true, 0, ANSWERED), 60);
        let (request, reply) = (ASSURED, ASSURED | ANSWERED);
        assert_eq!(TIMEOUTS.of(true, request, reply), 86_400);
        for (request, reply) in [(request | FIN, reply), (request, reply | FIN)] {
            assert!(!closing(request, reply), "half closed is not closed");
            assert_eq!(TIMEOUTS.of(true, request, reply), 3_600);
        }
        assert!(closing(request | FIN, reply | FIN));
        assert_eq!(TIMEOUTS.of(true, request | FIN, reply | FIN), 120);
        for (request, reply) in [(request | RST, reply), (request, reply | RST), (request | FIN, RST)] {
            assert!(closing(request, reply));
            assert_eq!(TIMEOUTS.of(true, request, reply), 10);
        }
    }

    #[test]
    fn classes() {
        let (request, reply) = (ASSURED, ASSURED | ANSWERED);
        for (expected, tcp, request, reply) in [
            (class::ENDED, true, request | FIN, reply | FIN),
            (class::ENDED, true, request, reply | RST),
            (class::ENDED, true, 0, RST),
            (class::UNASSURED, true, 0, ANSWERED),
            (class::UNASSURED, false, 0, 0),
            (class::UNASSURED, false, 0, ANSWERED),
            (class::UDP, false, request, reply),
            (class::HALF_CLOSED, true, request | FIN, reply),
            (class::COUNT, true, request, reply),
            (class::COUNT, true, request | REMOVED | MARKED, reply),
        ] {
            assert_eq!(class(tcp, request, reply), expected, "{request:#x} {reply:#x}");
        }
    }

    #[test]
    fn udp_times() {
        assert_eq!(TIMEOUTS.of(false, 0, 0), 30);
        assert_eq!(TIMEOUTS.of(false, 0, ANSWERED), 30, "a question and its answer");
        assert_eq!(TIMEOUTS.of(false, ASSURED, ASSURED | ANSWERED), 121);
    }

    #[test]
    fn only_a_bare_syn_opens() {
        assert!(opens(flag::SYN));
        assert!(!opens(flag::SYN | flag::ACK));
        assert!(!opens(flag::SYN | flag::RST));
        assert!(!opens(flag::SYN | flag::FIN));
        assert!(!opens(flag::ACK));
        assert!(!opens(0));
    }
}
