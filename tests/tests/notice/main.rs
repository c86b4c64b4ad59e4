//! Notice of a node's end: agents as users start them, told by a file, by each cloud's metadata
//! server, by logind and by the Node object, and what load balancers and other nodes hear. Needs
//! root; without it each test fails with an explanation.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod clouds;
mod file;
mod fixture;
mod lease;
mod logind;
