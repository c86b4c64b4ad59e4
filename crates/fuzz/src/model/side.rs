//! The two ends of a conversation.

/// Sender of a packet: the index of an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum From {
    Client = 0,
    Endpoint = 1,
}

impl From {
    pub fn other(self) -> usize {
        1 - self as usize
    }
}
