//! An SCTP association as a middlebox sees it: its verification tags (RFC 9260 section 8.5), and
//! what they prove.
//!
//! | packet | its effect, if its tag is that of its receiver |
//! |---|---|
//! | INIT of the client, alone, with tag 0 | begins it; once it is assured, asks for a restart |
//! | INIT ACK of the endpoint | names the endpoint's tag, until it is assured |
//! | any packet of the client | proves that the endpoint has answered: it is assured |
//! | COOKIE ACK of the endpoint | it is assured, and the endpoint's tag is not known |
//! | COOKIE ACK with the tag of a restart | the endpoint has accepted it; its tag is not known |
//! | SHUTDOWN, SHUTDOWN ACK | it is being shut down |
//! | ABORT, SHUTDOWN COMPLETE | it is over |
//!
//! A packet with another tag has no effect. ABORT and SHUTDOWN COMPLETE with the flag T carry the
//! tag of their sender instead (section 8.5.1). While the endpoint's tag is not known and the
//! association is assured, the client's next packet shows it, unless it is one of these two.

use super::side::From;
use crate::segment::{Chunk, Segment, Tag};

/// Tags and state of an association.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Association {
    /// Initiate tag of the client.
    pub client: u32,
    /// Initiate tag of the endpoint, if it is known.
    pub endpoint: Option<u32>,
    /// Initiate tag that the endpoint uses next.
    next: u32,
    /// Initiate tag of a restart that the endpoint has not accepted.
    pub restart: Option<u32>,
    pub answered: bool,
    pub assured: bool,
    /// Whether the client, and the endpoint, has begun to shut it down.
    pub shut: [bool; 2],
    /// Whether the client, and the endpoint, has ended it.
    pub over: [bool; 2],
}

/// A tag that no host chooses.
const STRANGE: u32 = 0x7777_1234;
/// Distance between the tags of a client before and after its restart.
const RESTARTED: u32 = 0x0001_0001;

impl Association {
    pub fn new(client: u32, endpoint: u32) -> Self {
        Self {
            client,
            endpoint: None,
            next: endpoint,
            restart: None,
            answered: false,
            assured: false,
            shut: [false; 2],
            over: [false; 2],
        }
    }

    pub fn is_over(&self) -> bool {
        self.over[0] || self.over[1]
    }

    pub fn is_shutting_down(&self) -> bool {
        self.shut[0] || self.shut[1]
    }

    /// Returns the verification tag and the initiate tag of a packet of this association.
    pub fn tags(&self, from: From, segment: Segment) -> (u32, u32) {
        let endpoint = self.endpoint.unwrap_or(self.next);
        let (own, receivers) = match (from, segment.chunk) {
            (From::Client, _) => (self.client, endpoint),
            // They answer the INIT that came last.
            (From::Endpoint, Chunk::InitAck | Chunk::CookieAck) => {
                (endpoint, self.restart.unwrap_or(self.client))
            }
            (From::Endpoint, _) => (endpoint, self.client),
        };
        let tag = match segment.tag {
            Tag::Right if matches!(segment.chunk, Chunk::Init | Chunk::BundledInit) => 0,
            Tag::Zero => 0,
            Tag::Right | Tag::Flagged => receivers,
            Tag::Own | Tag::Reflected => own,
            Tag::Other => STRANGE,
        };
        let initiate = if from == From::Client && self.assured { own.wrapping_add(RESTARTED) } else { own };
        // No host chooses 0.
        (tag, segment.sequence.of(initiate).max(1))
    }

    /// Whether a packet with this tag belongs to the association.
    pub fn has(&self, from: From, segment: Segment, tag: u32) -> bool {
        let ends = matches!(segment.chunk, Chunk::Abort | Chunk::ShutdownComplete);
        let reflected = ends && matches!(segment.tag, Tag::Reflected | Tag::Flagged);
        let of_client = (from == From::Client) == reflected;
        let expected = if of_client { Some(self.client) } else { self.endpoint };
        expected == Some(tag)
    }

    /// Whether a packet of the endpoint accepts the restart that the client has asked for.
    pub fn accepts_restart(&self, segment: Segment, tag: u32) -> bool {
        self.assured && segment.chunk == Chunk::CookieAck && self.restart == Some(tag)
    }

    /// Follows a packet that was translated, and returns whether it belongs to the association.
    /// `begins`: it is an INIT that begins the association, or begins it anew.
    pub fn follow(&mut self, from: From, segment: Segment, tags: (u32, u32), begins: bool) -> bool {
        match from {
            From::Client => self.follow_client(segment, tags, begins),
            From::Endpoint => self.follow_endpoint(segment, tags),
        }
    }

    fn follow_client(&mut self, segment: Segment, (tag, initiate): (u32, u32), begins: bool) -> bool {
        if opens(segment, tag) {
            if self.assured {
                self.restart = Some(initiate);
            } else if begins && self.client != initiate {
                (self.client, self.endpoint, self.answered) = (initiate, None, false);
                self.next = self.next.wrapping_add(1);
            }
            return begins;
        }
        let ends = matches!(segment.chunk, Chunk::Abort | Chunk::ShutdownComplete);
        if self.assured && self.endpoint.is_none() && tag != 0 && !ends {
            self.endpoint = Some(tag);
        }
        let belongs = self.has(From::Client, segment, tag);
        if belongs {
            self.note_end(From::Client, segment.chunk);
            self.assured |= !self.over[From::Client as usize];
        }
        belongs
    }

    fn follow_endpoint(&mut self, segment: Segment, (tag, initiate): (u32, u32)) -> bool {
        if self.accepts_restart(segment, tag) {
            let next = self.endpoint.unwrap_or(self.next).wrapping_add(1);
            *self = Self { client: tag, endpoint: None, next, restart: None, ..*self };
            (self.shut, self.over) = ([false; 2], [false; 2]);
            return true;
        }
        if !self.has(From::Endpoint, segment, tag) {
            return false;
        }
        self.note_end(From::Endpoint, segment.chunk);
        match segment.chunk {
            _ if self.assured => {}
            Chunk::InitAck => (self.endpoint, self.answered) = (Some(initiate), true),
            Chunk::CookieAck => {
                self.next = self.endpoint.unwrap_or(self.next);
                (self.endpoint, self.answered, self.assured) = (None, true, true);
            }
            _ => {}
        }
        true
    }

    fn note_end(&mut self, from: From, chunk: Chunk) {
        match chunk {
            Chunk::Abort | Chunk::ShutdownComplete => self.over[from as usize] = true,
            Chunk::Shutdown | Chunk::ShutdownAck => self.shut[from as usize] = true,
            _ => {}
        }
    }
}

/// Whether a client's packet begins an association: an INIT that is alone in its packet, with tag 0
/// (sections 3.3.2 and 8.5.1).
pub fn opens(segment: Segment, tag: u32) -> bool {
    segment.chunk == Chunk::Init && tag == 0
}
