//! A ledger of the numbered datagrams that arrived at any server, by which a meter distinguishes
//! losses on the way there from those on the way back.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The ledger, shared by the servers and the meters of one process.
#[derive(Clone, Debug, Default)]
pub struct Ledger(Arc<Mutex<HashMap<u64, Vec<u8>>>>);

/// The meter of a datagram and its number, in text: `datagram <meter> <number>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Label {
    pub(super) meter: u64,
    pub(super) number: usize,
}

impl Label {
    pub(super) fn unused_meter() -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn text(self) -> String {
        format!("datagram {} {}", self.meter, self.number)
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        let (meter, number) = text.strip_prefix("datagram ")?.split_once(' ')?;
        Some(Self { meter: meter.parse().ok()?, number: number.parse().ok()? })
    }
}

impl Ledger {
    pub(super) fn record(&self, label: Label) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        count(all.entry(label.meter).or_default(), label.number);
    }

    /// The number of arrivals of each datagram of a meter.
    pub(super) fn arrivals(&self, meter: u64) -> Vec<u8> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(&meter).cloned().unwrap_or_default()
    }
}

/// Adds one to the count of a number.
pub(super) fn count(counts: &mut Vec<u8>, number: usize) {
    // A number beyond that of any meter is a corrupted datagram; it must not cause an allocation.
    assert!(number < 100_000_000, "datagram number {number}");
    if counts.len() <= number {
        counts.resize(number + 1, 0);
    }
    counts[number] = counts[number].saturating_add(1);
}
