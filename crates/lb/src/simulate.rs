//! The outcome of requests while a cluster changes: discrete events on a time line, the same for
//! the same seed. Pure: no input or output, no clock. The answers and choices of nodes follow from
//! versions of the objects by the same code as an agent's ([`super::judge`],
//! [`traffic_policy_cluster::model`]). This module adds the times at which each of them learns of a
//! version, and at which a balancer acts on it.
//!
//! ```text
//! event ─► objects ─► version ─┬─ agents, each after its delay ─► outcome of requests and checks
//!     │                        └─ the balancer's controller ────► the check, and its nodes
//!     └─► existing pods and nodes      checks ─► (un)healthy ───► nodes that get requests
//! ```

mod agents;
mod effect;
mod event;
mod front;
mod input;
mod line;
mod machines;
mod queue;
mod requests;
mod run;
mod silence;
mod simulated;
mod step;
mod tally;
mod version;
mod world;

pub use event::{Event, PodEvent, Timed};
pub use input::{Learn, Load, Measured, SimulateError, Simulation};
pub use line::{Moment, What};
pub use simulated::Simulated;
pub use tally::{Counts, Second, Why};
