//! A flow of the model: its addresses and ports, its counts, and the state of a TCP connection.

use std::net::SocketAddr;

use traffic_policy_testing::{harness::HZ, lab::Family};

use super::{association::Association, moment::Moment, side::From};
use crate::{
    segment::{Flags, Number, Protocol, Segment},
    topology::{Endpoint, TARGET},
};

/// Whether a connection has ended, so that a SYN opens a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    No,
    Yes,
    /// A segment near a real one decided this: a middlebox cannot know.
    Unspecified,
}

/// One end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host {
    /// Sequence number of its SYN.
    pub initial: u32,
    /// Sequence number that it sends next.
    pub next: u32,
    /// Acknowledgement number of its last segment.
    pub acknowledged: u32,
    pub fin: bool,
}

/// Packets of one direction that were translated, and the bytes of their IP packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    pub packets: u64,
    pub bytes: u64,
}

/// A flow through the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    pub protocol: Protocol,
    pub service: usize,
    /// Address of the client; `frontend` is the Service's address to which it sends.
    pub client: SocketAddr,
    pub frontend: SocketAddr,
    pub endpoint: Endpoint,
    /// Address of the client as the endpoint sees it.
    pub source: SocketAddr,
    /// Whether the endpoint has answered; TCP: with a SYN-ACK that acknowledges the SYN.
    pub answered: bool,
    /// Whether it is assured. TCP: the client has acknowledged the answer. UDP: once there was an
    /// answer, a datagram of either side came two seconds or more after the first. SCTP: as
    /// [`Association`] says.
    pub assured: bool,
    /// Moment of its first packet; `heard` is that of its endpoint's first answer.
    pub began: Moment,
    pub heard: Option<Moment>,
    pub ended: Ended,
    /// Whether forged segments came near enough to real ones that its numbers are uncertain.
    pub loose: bool,
    /// The ends of a TCP connection: client, endpoint.
    pub hosts: [Host; 2],
    /// State of SCTP.
    pub association: Association,
    pub counts: [Count; 2],
    /// Times of its last packet in each direction, on the model's clock. SCTP: of those that belong
    /// to it, which its tags show.
    pub last: [u64; 2],
    /// Moment of its last packet that belongs to it for certain: others do not keep it alive.
    pub belonged: Moment,
    /// Whether the packet that was followed last belongs to it for certain.
    pub belongs: bool,
    /// Moment of a SYN that came while it was assured, if no packet that belongs to it has come
    /// since.
    pub syn: Option<Moment>,
    /// Whether it ended by an RST or ABORT.
    pub reset: bool,
    /// Whether its endpoint was removed and takes no more new flows. Unless it is an established
    /// connection, the client's next packet that may begin a flow then chooses again.
    pub removed: bool,
    /// Number of sweeps since its last packet that found it idle for too long; `noticed` tells
    /// whether any may have noticed it.
    pub found_over: u8,
    pub noticed: bool,
}

/// Distance from every other number in use.
const FAR: u32 = 0x8000_0000;

impl Number {
    pub fn of(self, right: u32) -> u32 {
        match self {
            Self::Right => right,
            Self::Near(off) => right.wrapping_add_signed(off.into()),
            Self::Far(more) => right.wrapping_add(FAR).wrapping_add(more.into()),
        }
    }

    pub fn is_right(self) -> bool {
        matches!(self, Self::Right | Self::Near(0))
    }

    pub fn is_near(self) -> bool {
        matches!(self, Self::Near(_)) && !self.is_right()
    }
}

/// Time since the last packet of either side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    Short,
    Long,
    Unspecified,
}

/// Jiffies that count as a long pause for certain; below [`NO_PAUSE`] there is none. A client waits
/// a second before it retransmits its SYN (RFC 6298 section 2); a quarter of a second already is a
/// pause.
const PAUSE: u64 = 1000;
const NO_PAUSE: u64 = HZ as u64 / 4;
/// Jiffies after which an endpoint that knows the connection would have answered: three seconds.
const SILENCE: u64 = 3 * HZ as u64;
/// Jiffies after which datagrams are more than a request and its answer.
const STREAM: u64 = 2 * HZ as u64;
/// Maximum number of jiffies for which the client's datagrams are not checked: a second.
const LOOK: u64 = HZ as u64;

impl Flow {
    pub fn pause(&self, clock: u64) -> Pause {
        if clock - self.last[0].max(self.last[1]) > PAUSE {
            Pause::Long
        } else if self.belonged.most(clock) < NO_PAUSE {
            Pause::Short
        } else {
            Pause::Unspecified
        }
    }

    /// Follows a SYN of another number that comes before the client has acknowledged the answer to
    /// the first.
    fn attempt(&mut self, sequence: u32, pause: Pause) {
        match pause {
            Pause::Short => {}
            Pause::Long => {
                self.hosts[0].initial = sequence;
                self.hosts[0].next = sequence.wrapping_add(1);
                // Segments of the endpoint that belong to the previous connection cannot be
                // distinguished.
                self.loose |= self.answered;
                self.answered = false;
            }
            Pause::Unspecified => self.loose = true,
        }
    }

    /// Whether a SYN, or a segment of a host that has accepted one, may begin another connection
    /// because the endpoint has forgotten this one.
    pub fn may_be_forgotten(&self, clock: u64) -> bool {
        self.syn.is_some_and(|syn| syn.most(clock) >= SILENCE)
    }

    /// Returns the sequence and acknowledgement number of a segment of this flow, or the tags of an
    /// SCTP packet. A SYN on a connection that has been answered belongs to a new one.
    pub fn numbers(&self, from: From, segment: Segment) -> (u32, u32) {
        if segment.protocol == Protocol::Sctp {
            return self.association.tags(from, segment);
        }
        let (own, other) = (&self.hosts[from as usize], &self.hosts[from.other()]);
        let sequence = match segment.flags {
            Flags::Syn | Flags::SynAck if !self.answered || segment.flags == Flags::SynAck => own.initial,
            Flags::Syn => own.next.wrapping_add(FAR / 2),
            _ => own.next,
        };
        let acknowledgement = match segment.flags {
            Flags::Syn | Flags::Rst => return (segment.sequence.of(sequence), 0),
            Flags::SynAck => other.initial.wrapping_add(1),
            _ => other.next,
        };
        (segment.sequence.of(sequence), segment.acknowledgement.of(acknowledgement))
    }

    /// Returns the endpoint's end of its flow.
    pub fn target(&self, family: Family) -> SocketAddr {
        SocketAddr::new(self.endpoint.spot.of(family), TARGET)
    }

    pub fn counted(&self, from: From) -> Count {
        self.counts[from as usize]
    }

    /// Counts a packet of this number of bytes.
    pub fn count(&mut self, from: From, bytes: u64, now: Moment) {
        if self.protocol != Protocol::Sctp || self.belongs {
            self.last[from as usize] = now.clock;
        }
        self.found_over = 0;
        if self.protocol == Protocol::Udp || self.belongs {
            self.belonged = now;
            self.belongs = false;
        }
        let count = &mut self.counts[from as usize];
        count.packets += 1;
        count.bytes += bytes;
    }

    /// Follows a packet that was translated. `numbers`: those of [`Self::numbers`]; `begins`: it is
    /// an INIT that begins the association anew.
    pub fn follow(&mut self, from: From, segment: Segment, numbers: (u32, u32), begins: bool, now: Moment) {
        self.belongs = false;
        match self.protocol {
            Protocol::Tcp => self.follow_segment(from, segment, numbers.0, now),
            Protocol::Udp => self.follow_datagram(from, now),
            Protocol::Sctp => {
                self.belongs = self.association.follow(from, segment, numbers, begins);
                let Association { answered, assured, .. } = self.association;
                (self.answered, self.assured) = (answered, assured);
                self.reset = self.association.is_over();
                self.ended = if self.reset { Ended::Yes } else { Ended::No };
            }
        }
    }

    fn follow_datagram(&mut self, from: From, now: Moment) {
        if let (Some(heard), false) = (self.heard, self.assured) {
            // The program checks each datagram of the endpoint, and those of the client once a
            // second.
            let look = if from == From::Client { LOOK } else { 0 };
            if now.clock - self.began.clock > STREAM + look && (look == 0 || now.clock - heard.clock > look) {
                (self.assured, self.loose) = (true, false);
            } else {
                self.loose |= self.began.most(now.clock) > STREAM;
            }
        }
        if from == From::Endpoint {
            self.answered = true;
            self.heard.get_or_insert(now);
        }
    }

    fn follow_segment(&mut self, from: From, segment: Segment, sequence: u32, now: Moment) {
        let pause = self.pause(now.clock);
        let (exact_sequence, exact_acknowledgement) =
            (segment.sequence.is_right(), segment.acknowledgement.is_right());
        match (segment.flags, from) {
            (Flags::Syn, From::Client) if self.assured || self.loose => {
                self.syn.get_or_insert(now);
                return;
            }
            // A SYN of another number that follows at once may be forged: the answer to the first
            // one is awaited.
            (Flags::Syn, From::Client) => {
                if sequence != self.hosts[0].initial {
                    self.attempt(sequence, pause);
                }
                return;
            }
            // Before the endpoint has answered, only the client's giving up matters.
            (flags, From::Client) if !self.answered => {
                let far = matches!(segment.sequence, Number::Far(_)) && !self.loose;
                if matches!(flags, Flags::Rst | Flags::RstAck) && !far {
                    self.ended = Ended::Unspecified;
                }
                return;
            }
            (Flags::SynAck, From::Endpoint) if !self.answered => {
                // Only a fitting one arrives here: see `Model::reply`.
                self.answered = true;
                let acknowledged = self.hosts[0].next;
                self.hosts[1] =
                    Host { initial: sequence, next: sequence.wrapping_add(1), acknowledged, fin: false };
                return;
            }
            // It may belong to another attempt.
            (flags, From::Endpoint) if !self.answered && flags != Flags::RstAck => {
                self.ended = Ended::Unspecified;
                return;
            }
            // The endpoint refuses; the segment fits, since `Model::reply` accepts no other.
            (Flags::RstAck, From::Endpoint) if !self.answered => {
                self.ended = Ended::Unspecified;
                return;
            }
            (Flags::SynAck, From::Endpoint) if exact_sequence && exact_acknowledgement => return,
            // No correct host sends these.
            (Flags::SynAck, _) | (Flags::Syn, From::Endpoint) => {
                self.loose = true;
                return;
            }
            _ => {}
        }
        // Until the client has acknowledged the SYN-ACK, only its acknowledgement proves its
        // position; and an endpoint that continues to send (TCP fast open) may make it acknowledge
        // more.
        let talks_on = from == From::Endpoint && (segment.payload > 0 || segment.flags == Flags::FinAck);
        self.loose |= !self.assured && (from == From::Client && !exact_sequence || talks_on);
        let reset = matches!(segment.flags, Flags::Rst | Flags::RstAck);
        // Until then an RST need only acknowledge the SYN, and a FIN counts by chance.
        if !self.assured && from == From::Endpoint && reset || self.loose && segment.flags == Flags::FinAck {
            self.ended = Ended::Unspecified;
        }
        if exact_sequence && (exact_acknowledgement || segment.flags == Flags::Rst) {
            self.follow_exact(from, segment, reset);
            self.belongs = self.assured && !self.loose && self.ended == Ended::No && !reset;
            if self.belongs && self.syn.is_some_and(|syn| now.clock > syn.clock) {
                self.syn = None;
            }
        } else if !reset && self.may_be_forgotten(now.clock) {
            self.loose = true;
            self.ended = Ended::Unspecified;
        } else if reset && exact_sequence {
            // RFC 5961 section 3.2 requires only the sequence number to be exact.
            self.ended = Ended::Unspecified;
        } else if segment.sequence.is_near() || segment.acknowledgement.is_near() {
            self.loose = true;
            // After both FINs it may be the segment that acknowledges the last one.
            let closing = self.hosts.iter().all(|host| host.fin);
            if reset || segment.flags == Flags::FinAck || self.ended == Ended::Yes || closing {
                self.ended = Ended::Unspecified;
            }
        }
    }

    fn follow_exact(&mut self, from: From, segment: Segment, reset: bool) {
        let acknowledged_by_other = self.hosts[from.other()].acknowledged;
        let sure = self.assured && !self.loose;
        if reset {
            // Without ACK it must be exactly the number that the other end has acknowledged; with
            // ACK, it may end data under way.
            let exact =
                segment.flags == Flags::RstAck || acknowledged_by_other == self.hosts[from as usize].next;
            self.ended = if sure && exact && self.ended != Ended::Unspecified {
                self.reset = true;
                Ended::Yes
            } else {
                Ended::Unspecified
            };
            return;
        }
        if self.ended == Ended::Yes {
            // The flow continues after its end.
            self.ended = Ended::Unspecified;
        }
        if from == From::Client && self.answered {
            self.assured = true;
        }
        let other_next = self.hosts[from.other()].next;
        let own = &mut self.hosts[from as usize];
        own.acknowledged = other_next;
        own.next = own.next.wrapping_add(segment.payload.into());
        if segment.payload > 0 {
            own.fin = false;
        }
        if segment.flags == Flags::FinAck {
            own.fin = true;
            own.next = own.next.wrapping_add(1);
        }
        let [client, endpoint] = &self.hosts;
        let acknowledged = client.acknowledged == endpoint.next && endpoint.acknowledged == client.next;
        if client.fin && endpoint.fin && acknowledged && self.ended == Ended::No {
            self.ended = if sure { Ended::Yes } else { Ended::Unspecified };
        }
    }
}
