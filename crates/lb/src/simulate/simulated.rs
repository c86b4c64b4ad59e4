//! The results of a simulation.

use std::{collections::BTreeMap, time::Duration};

use super::{
    line::Moment,
    tally::{Counts, Second, Why},
};
use crate::verdict::Question;

/// The results of all requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Simulated {
    pub nodes: Vec<String>,
    pub pods: Vec<String>,
    pub seconds: Vec<Second>,
    pub line: Vec<Moment>,
    /// The reasons why requests were lost or cut.
    pub why: BTreeMap<Why, u64>,
    /// The number of answered requests that went on through another node than they began with.
    pub outlived: u64,
    /// The check that the balancer makes at the start.
    pub question: Question,
    /// The time of each node's first check; the others follow at the balancer's interval.
    pub phases: BTreeMap<String, Duration>,
}

impl Simulated {
    #[must_use]
    pub fn total(&self) -> Counts {
        self.seconds.iter().fold(Counts::default(), |sum, second| sum + second.all)
    }

    /// Returns the requests of each node, by name.
    #[must_use]
    pub fn by_node(&self) -> BTreeMap<&str, Counts> {
        sums(&self.nodes, self.seconds.iter().map(|second| &second.nodes))
    }

    /// Returns the requests of each pod, by name; requests that reached no pod are missing.
    #[must_use]
    pub fn by_pod(&self) -> BTreeMap<&str, Counts> {
        sums(&self.pods, self.seconds.iter().map(|second| &second.pods))
    }
}

fn sums<'n>(
    names: &'n [String],
    seconds: impl Iterator<Item = &'n BTreeMap<usize, Counts>>,
) -> BTreeMap<&'n str, Counts> {
    let mut sums: BTreeMap<&str, Counts> =
        names.iter().map(|name| (name.as_str(), Counts::default())).collect();
    for (number, counts) in seconds.flatten() {
        if let Some(name) = names.get(*number) {
            let sum = sums.entry(name).or_default();
            *sum = *sum + *counts;
        }
    }
    sums
}
