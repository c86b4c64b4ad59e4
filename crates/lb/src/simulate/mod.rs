//! The fate of requests while a cluster changes: discrete events on a time line, the same for the same seed. Pure: no input or
//! output, no clock. What nodes answer and choose follows from versions of the objects by the same code as an agent's
//! ([`super::judge`], [`traffic_policy_cluster::model`]); what is added here is when each of them learns of a version, and when a balancer believes it.
//!
//! ```text
//! event ─► objects ─► version ─┬─ agents, each after its delay ─► where a request goes, what a check is told
//!     │                        └─ the balancer's controller ────► what is asked, and of whom
//!     └─► pods and nodes that are really there      checks ─────► dark or green ─► who is sent requests
//! ```

mod agents;
mod event;
mod front;
mod input;
mod line;
mod queue;
mod requests;
mod run;
mod steps;
mod tally;

pub use event::{Event, PodEvent, Timed};
pub use input::{Learn, Load, Measured, SimulateError, Simulation};
pub use line::{Moment, What};
pub use run::Simulated;
pub use tally::{Counts, Second, Why};
