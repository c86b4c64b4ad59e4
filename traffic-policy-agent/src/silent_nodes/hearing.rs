//! Those who are asked for a sign of life, and what is heard of them.

/// One who is asked.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    Node(String),
    /// The gateway of the default route.
    Gateway,
}

/// An answer to one question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    Alive,
    /// Nobody answered these questions, in words.
    Silent(String),
    /// The silence proves nothing.
    Nothing,
    /// There is no such gateway.
    Absent,
}
