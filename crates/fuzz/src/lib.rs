//! Random packets and Service changes through the compiled programs, compared with a reference
//! model of the required results.
//!
//! ```text
//! seed → actions ─┬→ frame → program → outcome, verdict, bytes, flow table ─┐
//!                 └→ reference model → required results ────────────────────┴→ equal?
//! ```
//!
//! A sequence with a difference is shrunk and printed as a row of a test.
//!
//! The model is written from RFC 9293, RFC 5961, RFC 9260 and conntrack's rules, not from the
//! program. Where a rule leaves a choice (which endpoint, which source port) the model checks that
//! the program's choice is permitted, and takes it over. Where a forged segment was near enough to
//! a real one that no middlebox can tell them apart, the flow becomes
//! [`Ended::Unspecified`][model::Ended] and either result is accepted. The verification tags of
//! SCTP are either right or wrong: its state is always certain.

pub mod action;
pub mod concurrent;
pub mod damage;
pub mod model;
pub mod path;
pub mod row;
pub mod run;
pub mod segment;
pub mod shrink;
pub mod topology;
pub mod totals;

pub use self::{
    action::Action,
    path::Path,
    run::{Difference, check, fuzz},
    shrink::shrink,
    totals::Totals,
};
