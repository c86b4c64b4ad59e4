//! The counts of a run: packets, flows, associations.

/// Counts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub packets: u64,
    pub translated: u64,
    pub flows: u64,
    pub unchanged: u64,
    /// SCTP: associations that were assured, and restarts that were accepted.
    pub associations: u64,
    pub restarts: u64,
}
