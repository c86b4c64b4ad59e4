//! The SCTP state of a flow entry: chunks, and the verification tags that tell whether a packet
//! belongs to its association.
//!
//! Every packet except an INIT carries the tag that its receiver has chosen in INIT or INIT ACK
//! (RFC 9260 section 8.5). An attacker that sees no packet of the association cannot know it. So a
//! packet with another tag is forwarded, the host decides, and nothing changes here. Entries keep
//! two tags each, in memory order as in the packet:
//!
//! | | high half | low half |
//! |---|---|---|
//! | request entry | initiate tag of the client | tag of requests: the initiate tag of the endpoint |
//! | reply entry | initiate tag of the endpoint | tag of replies: the initiate tag of the client |
//!
//! A tag of 0, which no host may choose, means that the tag is not known. The bits of an entry's
//! state are those of [`crate::tcp`]. `ANSWERED`: there was an INIT ACK or COOKIE ACK. `ASSURED`:
//! the client has sent the endpoint's tag (COOKIE ECHO), or the endpoint a COOKIE ACK. `FIN`: a
//! SHUTDOWN or SHUTDOWN ACK of this direction. `RST`: an ABORT or SHUTDOWN COMPLETE. Modelled on
//! <https://github.com/torvalds/linux/blob/v6.12/net/netfilter/nf_conntrack_proto_sctp.c>.
//!
//! Only the first chunk of a packet is read: INIT, INIT ACK, COOKIE ECHO, COOKIE ACK and SHUTDOWN
//! COMPLETE are always first (sections 3.3 and 6.10). An ABORT behind another chunk is not seen:
//! such a flow ends by its idle time.

use crate::tcp::{ASSURED, FIN, RST, Timeouts};

/// Chunk types: RFC 9260 section 3.2.
pub mod chunk {
    pub const DATA: u8 = 0;
    pub const INIT: u8 = 1;
    pub const INIT_ACK: u8 = 2;
    pub const SACK: u8 = 3;
    pub const HEARTBEAT: u8 = 4;
    pub const HEARTBEAT_ACK: u8 = 5;
    pub const ABORT: u8 = 6;
    pub const SHUTDOWN: u8 = 7;
    pub const SHUTDOWN_ACK: u8 = 8;
    pub const COOKIE_ECHO: u8 = 10;
    pub const COOKIE_ACK: u8 = 11;
    pub const SHUTDOWN_COMPLETE: u8 = 14;
    /// A flag of ABORT and SHUTDOWN COMPLETE: the tag is the sender's own, reflected
    /// (section 8.5.1).
    pub const REFLECTED: u8 = 1;
}

/// The bytes of the common header, and of the common header with a chunk header.
pub const HEADER: u32 = 12;
pub const WITH_CHUNK: u32 = HEADER + 4;
/// The bytes of an INIT chunk without parameters.
const INIT_LENGTH: u32 = 20;

/// The idle time of an assured flow in seconds: `nf_conntrack_sctp_timeout_established`. An idle
/// host sends a HEARTBEAT every 30 seconds. (A flow that is being shut down has the time-out of a
/// TCP connection after both FINs, not conntrack's 3 seconds.)
const ESTABLISHED: u32 = 210;
/// The seconds after the last packet of an association after which it counts as forgotten: a
/// HEARTBEAT is overdue, and an INIT chooses a new endpoint.
pub const SILENCE: u32 = 45;

/// Two tags: [`own`] in the high half, [`carried`] in the low one. Each is a word in memory order.
pub type Tags = u64;

#[inline(always)]
pub const fn tags(own: u32, carried: u32) -> Tags {
    (own as u64) << 32 | carried as u64
}

/// The initiate tag of the direction's sender; 0 if it is not known.
#[inline(always)]
pub const fn own(tags: Tags) -> u32 {
    (tags >> 32) as u32
}

/// The tag that packets of the direction carry; 0 if it is not known.
#[inline(always)]
pub const fn carried(tags: Tags) -> u32 {
    tags as u32
}

/// The tag and the first chunk of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Head {
    /// The verification tag, in memory order.
    pub tag: u32,
    /// See [`chunk`].
    pub kind: u8,
    pub flags: u8,
    /// The bytes of the chunk by its own length field, header included; host order.
    pub length: u16,
}

impl Head {
    /// Reads a head. `chunk`: type, flags and length, a word in memory order.
    #[inline(always)]
    pub const fn of(tag: u32, chunk: u32) -> Self {
        let [kind, flags, high, low] = chunk.to_ne_bytes();
        Self { tag, kind, flags, length: u16::from_be_bytes([high, low]) }
    }

    /// Whether it opens an association: an INIT with tag 0, alone in its packet of `length` bytes,
    /// common header included (sections 3.3.2 and 8.5.1).
    #[inline(always)]
    pub const fn opens(&self, length: u32) -> bool {
        let chunk = self.length as u32;
        self.kind == chunk::INIT
            && self.tag == 0
            && chunk >= INIT_LENGTH
            && HEADER + chunk <= length
            && length < WITH_CHUNK + chunk
    }

    /// Whether it ends an association, or begins to.
    #[inline(always)]
    pub const fn ends(&self) -> bool {
        matches!(self.kind, chunk::ABORT | chunk::SHUTDOWN | chunk::SHUTDOWN_ACK | chunk::SHUTDOWN_COMPLETE)
    }

    /// Whether it is the last packet of its sender.
    #[inline(always)]
    pub const fn is_last(&self) -> bool {
        matches!(self.kind, chunk::ABORT | chunk::SHUTDOWN_COMPLETE)
    }

    /// Whether it belongs to the association, as far as its tag shows. `tags`: those of its
    /// direction.
    #[inline(always)]
    pub const fn fits(&self, tags: Tags) -> bool {
        let reflected = self.is_last() && self.flags & chunk::REFLECTED != 0;
        let expected = if reflected { own(tags) } else { carried(tags) };
        expected != 0 && self.tag == expected
    }

    /// The state of its direction's entry after this packet, if it [fits][Self::fits].
    #[inline(always)]
    pub const fn after(&self, state: u8) -> u8 {
        match self.kind {
            chunk::ABORT | chunk::SHUTDOWN_COMPLETE => state | RST,
            chunk::SHUTDOWN | chunk::SHUTDOWN_ACK => state | FIN,
            _ => state,
        }
    }
}

/// The time-out of a flow with these states of its entries, in jiffies. `second`: the jiffies of a
/// second.
#[inline(always)]
pub const fn timeout(timeouts: &Timeouts, second: u32, request: u8, reply: u8) -> u32 {
    if (request | reply) & RST != 0 {
        timeouts.reset
    } else if (request | reply) & FIN != 0 {
        timeouts.finished
    } else if request & ASSURED == 0 {
        timeouts.unassured
    } else {
        ESTABLISHED * second
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::{ANSWERED, tests::TIMEOUTS};

    const CLIENT: u32 = 0x1111_1111;
    const ENDPOINT: u32 = 0x2222_2222;

    fn head(kind: u8, tag: u32) -> Head {
        Head { tag, kind, flags: 0, length: 4 }
    }

    #[test]
    fn only_a_lone_init_without_a_tag_opens() {
        let init = Head { length: 20, ..head(chunk::INIT, 0) };
        assert!(init.opens(32));
        assert!(Head { length: 30, ..init }.opens(44), "padded");
        for (what, head, length) in [
            ("with a tag", Head { tag: CLIENT, ..init }, 32),
            ("another chunk behind it", init, 36),
            ("cut", init, 31),
            ("too short", Head { length: 16, ..init }, 28),
            ("INIT ACK", Head { kind: chunk::INIT_ACK, ..init }, 32),
            ("DATA", head(chunk::DATA, 0), 16),
        ] {
            assert!(!head.opens(length), "{what}");
        }
    }

    #[test]
    fn a_packet_fits_by_the_tag_of_its_receiver() {
        let requests = tags(CLIENT, ENDPOINT);
        for kind in
            [chunk::DATA, chunk::COOKIE_ECHO, chunk::ABORT, chunk::SHUTDOWN_COMPLETE, chunk::HEARTBEAT]
        {
            assert!(head(kind, ENDPOINT).fits(requests));
            assert!(!head(kind, CLIENT).fits(requests), "that of the other direction");
            assert!(!head(kind, 0).fits(requests) && !head(kind, 0).fits(0), "none");
            assert!(!head(kind, ENDPOINT).fits(tags(CLIENT, 0)), "not known");
        }
    }

    /// The rules of RFC 9260 section 8.5.1 (B) and (C).
    #[test]
    fn a_reflected_tag_is_the_senders_own() {
        let requests = tags(CLIENT, ENDPOINT);
        for kind in [chunk::ABORT, chunk::SHUTDOWN_COMPLETE] {
            let reflected = Head { flags: chunk::REFLECTED, ..head(kind, CLIENT) };
            assert!(reflected.fits(requests));
            assert!(!Head { tag: ENDPOINT, ..reflected }.fits(requests));
        }
        assert!(
            !Head { flags: chunk::REFLECTED, ..head(chunk::DATA, CLIENT) }.fits(requests),
            "other chunks have no such flag"
        );
    }

    #[test]
    fn life_of_an_association() {
        let of = |request, reply| timeout(&TIMEOUTS, 1, request, reply);
        assert_eq!(of(0, 0), 60);
        assert_eq!(of(0, ANSWERED), 60);
        let (request, reply) = (ASSURED, ASSURED | ANSWERED);
        assert_eq!(of(request, reply), 210);
        let kept = [chunk::DATA, chunk::SACK, chunk::HEARTBEAT, chunk::HEARTBEAT_ACK, chunk::COOKIE_ACK];
        assert!(kept.iter().all(|kind| head(*kind, ENDPOINT).after(request) == request));
        let shutting = head(chunk::SHUTDOWN, ENDPOINT).after(request);
        assert_eq!(of(shutting, reply), 120);
        let shut = head(chunk::SHUTDOWN_ACK, CLIENT).after(reply);
        assert_eq!(of(shutting, shut), 120);
        assert_eq!(of(head(chunk::SHUTDOWN_COMPLETE, ENDPOINT).after(shutting), shut), 10);
        assert_eq!(of(request, head(chunk::ABORT, CLIENT).after(reply)), 10);
    }
}
