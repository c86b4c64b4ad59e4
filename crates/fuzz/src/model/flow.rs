//! A flow of the model: its addresses and ports, and the state of a TCP connection.

use std::net::SocketAddr;

use traffic_policy_testing::{harness::HZ, lab::Family};

use super::Moment;
use crate::{
    segment::{Flags, Number, Segment},
    topology::{Endpoint, TARGET},
};

/// Whether a connection has ended, so that a SYN opens a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    No,
    Yes,
    /// A segment near a real one decided: a middlebox cannot know.
    Unspecified,
}

/// One end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host {
    /// Sequence number of its SYN.
    pub initial: u32,
    /// Sequence number that it sends next.
    pub next: u32,
    /// The acknowledgement number of its last segment.
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
    pub tcp: bool,
    pub service: usize,
    /// The client, and the Service as it asked it.
    pub client: SocketAddr,
    pub frontend: SocketAddr,
    pub endpoint: Endpoint,
    /// The client as the endpoint sees it.
    pub source: SocketAddr,
    /// The endpoint has answered, with a SYN-ACK that acknowledges the SYN.
    pub answered: bool,
    /// TCP: the client has acknowledged that. UDP: once there was an answer, a datagram of either side
    /// came two seconds or more after the first.
    pub assured: bool,
    /// The moments of its first packet, and of its endpoint's first answer.
    pub began: Moment,
    pub heard: Option<Moment>,
    pub ended: Ended,
    /// Forged segments came near enough to real ones that its numbers are not certain.
    pub loose: bool,
    /// Client, endpoint.
    pub hosts: [Host; 2],
    pub counts: [Count; 2],
    /// Its last packet in each direction: [`super::Model::clock`].
    pub last: [u64; 2],
    /// Its last packet that belongs to it for certain: others do not keep it alive.
    pub belonged: Moment,
    /// Whether the packet that was followed last does.
    pub belongs: bool,
    /// A SYN that came when it was assured, if nothing that belongs to it has come since.
    pub asked: Option<Moment>,
    /// It ended by an RST.
    pub reset: bool,
    /// Its endpoint takes no more new flows: unless it is a connection that is established, the client's next packet that may begin
    /// a flow chooses again.
    pub gone: bool,
    /// Sweeps since its last packet that found it idle for too long, and whether any may have noticed it.
    pub found_over: u8,
    pub noticed: bool,
}

/// Far from every other number in use.
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

/// Index of an end in [`Flow::hosts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum From {
    Client = 0,
    Endpoint = 1,
}

impl From {
    fn other(self) -> usize {
        1 - self as usize
    }
}

/// Time since the last packet of either side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    Short,
    Long,
    Unspecified,
}

/// A client waits a second before it sends its SYN again (RFC 6298 section 2); a quarter of it is a pause.
const PAUSE: u64 = 1000;
const NO_PAUSE: u64 = HZ as u64 / 4;
/// Jiffies after which an endpoint that knows the connection would have answered: three seconds.
const SILENCE: u64 = 3 * HZ as u64;
/// Jiffies after which datagrams are more than a question and its answer.
const STREAM: u64 = 2 * HZ as u64;
/// Jiffies for which nobody looks whether they have been answered, at most: a second.
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

    /// A SYN of another number before the client has acknowledged the answer to the first.
    fn attempt(&mut self, sequence: u32, pause: Pause) {
        match pause {
            Pause::Short => {}
            Pause::Long => {
                self.hosts[0].initial = sequence;
                self.hosts[0].next = sequence.wrapping_add(1);
                // What the endpoint sends of the connection before is not told apart.
                self.loose |= self.answered;
                self.answered = false;
            }
            Pause::Unspecified => self.loose = true,
        }
    }

    /// Whether a SYN, or what a host sends that has accepted one, may begin another connection: the endpoint has forgotten this one.
    pub fn may_be_forgotten(&self, clock: u64) -> bool {
        self.asked.is_some_and(|asked| asked.most(clock) >= SILENCE)
    }

    /// Sequence and acknowledgement number of a segment of this flow. A SYN on a connection that has been answered is that of a
    /// new one.
    pub fn numbers(&self, from: From, segment: Segment) -> (u32, u32) {
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

    /// The endpoint's end of its flow.
    pub fn target(&self, family: Family) -> SocketAddr {
        SocketAddr::new(self.endpoint.spot.of(family), TARGET)
    }

    pub fn counted(&self, from: From) -> Count {
        self.counts[from as usize]
    }

    /// Counts a packet of so many bytes.
    pub fn count(&mut self, from: From, bytes: u64, now: Moment) {
        self.last[from as usize] = now.clock;
        self.found_over = 0;
        if !self.tcp || self.belongs {
            self.belonged = now;
            self.belongs = false;
        }
        let count = &mut self.counts[from as usize];
        count.packets += 1;
        count.bytes += bytes;
    }

    /// Follows a segment that was translated, of these numbers.
    pub fn follow(&mut self, from: From, segment: Segment, sequence: u32, now: Moment) {
        let pause = self.pause(now.clock);
        self.belongs = false;
        if !segment.tcp {
            if let (Some(heard), false) = (self.heard, self.assured) {
                // The program looks at each datagram of the endpoint, and at the client's once a second.
                let look = if from == From::Client { LOOK } else { 0 };
                if now.clock - self.began.clock > STREAM + look
                    && (look == 0 || now.clock - heard.clock > look)
                {
                    (self.assured, self.loose) = (true, false);
                } else {
                    self.loose |= self.began.most(now.clock) > STREAM;
                }
            }
            if from == From::Endpoint {
                self.answered = true;
                self.heard.get_or_insert(now);
            }
            return;
        }
        let (exact_sequence, exact_acknowledgement) =
            (segment.sequence.is_right(), segment.acknowledgement.is_right());
        match (segment.flags, from) {
            (Flags::Syn, From::Client) if self.assured || self.loose => {
                self.asked.get_or_insert(now);
                return;
            }
            // A SYN of another number that follows at once may be forged: the first one's answer is awaited.
            (Flags::Syn, From::Client) => {
                if sequence != self.hosts[0].initial {
                    self.attempt(sequence, pause);
                }
                return;
            }
            // Before the endpoint has answered there is nothing to say, but that the client gives up.
            (flags, From::Client) if !self.answered => {
                let far = matches!(segment.sequence, Number::Far(_)) && !self.loose;
                if matches!(flags, Flags::Rst | Flags::RstAck) && !far {
                    self.ended = Ended::Unspecified;
                }
                return;
            }
            (Flags::SynAck, From::Endpoint) if !self.answered => {
                // Only one that fits comes here: see `Model::reply`.
                self.answered = true;
                let acknowledged = self.hosts[0].next;
                self.hosts[1] =
                    Host { initial: sequence, next: sequence.wrapping_add(1), acknowledged, fin: false };
                return;
            }
            // Another attempt's, perhaps.
            (flags, From::Endpoint) if !self.answered && flags != Flags::RstAck => {
                self.ended = Ended::Unspecified;
                return;
            }
            // The endpoint refuses: one that fits, as above.
            (Flags::RstAck, From::Endpoint) if !self.answered => {
                self.ended = Ended::Unspecified;
                return;
            }
            (Flags::SynAck, From::Endpoint) if exact_sequence && exact_acknowledgement => return,
            // Nobody sends these.
            (Flags::SynAck, _) | (Flags::Syn, From::Endpoint) => {
                self.loose = true;
                return;
            }
            _ => {}
        }
        // Until the client has acknowledged the SYN-ACK, its acknowledgement alone proves where it is; and an endpoint that talks on
        // (TCP fast open) may make it acknowledge more.
        let talks_on = from == From::Endpoint && (segment.payload > 0 || segment.flags == Flags::FinAck);
        self.loose |= !self.assured && (from == From::Client && !exact_sequence || talks_on);
        let reset = matches!(segment.flags, Flags::Rst | Flags::RstAck);
        // Until then an acknowledgement of the SYN is all that is asked of an RST, and a FIN counts by chance.
        if !self.assured && from == From::Endpoint && reset || self.loose && segment.flags == Flags::FinAck {
            self.ended = Ended::Unspecified;
        }
        if exact_sequence && (exact_acknowledgement || segment.flags == Flags::Rst) {
            self.follow_exact(from, segment, reset);
            self.belongs = self.assured && !self.loose && self.ended == Ended::No && !reset;
            if self.belongs && self.asked.is_some_and(|asked| now.clock > asked.clock) {
                self.asked = None;
            }
        } else if !reset && self.may_be_forgotten(now.clock) {
            self.loose = true;
            self.ended = Ended::Unspecified;
        } else if reset && exact_sequence {
            // RFC 5961 section 3.2 asks for the sequence number alone.
            self.ended = Ended::Unspecified;
        } else if segment.sequence.is_near() || segment.acknowledgement.is_near() {
            self.loose = true;
            // After both FINs it may be the one that acknowledges the last.
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
            // Without ACK it must be exactly what the other end has acknowledged; with it, it may end what is under way.
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
            // It goes on after its end.
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
