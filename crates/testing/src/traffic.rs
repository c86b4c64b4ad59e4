//! Traffic for tests and demo: servers for pods, meters at the client that count losses, and a load
//! balancer.
//!
//! One port understands one small language of lines, so that every tool can use every server:
//!
//! | first line | answer |
//! |---|---|
//! | `GET / HTTP/1.1` | an HTTP response with an [`Answer`] as its body |
//! | `transfer N` | N bytes each way, see [`transfer`] |
//! | anything else | an [`Answer`] as one line; the connection stays open for the next line |
//!
//! Each datagram is answered with an [`Answer`].

pub mod answer;
pub mod associations;
pub mod balancer;
mod closing;
pub mod connections;
pub mod conversation;
pub mod datagrams;
pub mod held;
pub mod http;
pub mod ledger;
pub mod probe;
pub mod retransmissions;
pub mod server;
pub mod transfer;
pub mod upload;

pub use self::answer::Answer;
pub use self::balancer::{Balancer, Target};
pub use self::connections::NewConnections;
pub use self::conversation::Conversation;
pub use self::datagrams::Datagrams;
pub use self::held::HeldConnections;
pub use self::ledger::Ledger;
pub use self::probe::{Outcome, Probe};
pub use self::server::{Faults, Server};
pub use self::upload::Upload;
