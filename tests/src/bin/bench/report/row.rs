//! One row of the report: what was measured, its spread, what it is compared with, and what it should be.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a figure counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Unit {
    /// Per packet.
    Nanoseconds,
    /// Millions of packets a second that arrived.
    Mpps,
    Microseconds,
    Milliseconds,
    PerSecond,
    /// Of one CPU.
    Percent,
    Megabytes,
    Bytes,
    Packets,
}

impl Unit {
    pub(crate) fn symbol(self) -> &'static str {
        match self {
            Self::Nanoseconds => "ns",
            Self::Mpps => "Mpps",
            Self::Microseconds => "µs",
            Self::Milliseconds => "ms",
            Self::PerSecond => "/s",
            Self::Percent => "%",
            Self::Megabytes => "MB",
            Self::Bytes => "B",
            Self::Packets => "packets",
        }
    }
}

/// The runs of one program: their median, and their quartiles as the spread.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Figure {
    pub(crate) median: f64,
    pub(crate) lower: f64,
    pub(crate) upper: f64,
    pub(crate) runs: usize,
}

impl Figure {
    /// # Panics
    /// Without a run.
    pub(crate) fn of(runs: &[f64]) -> Self {
        let mut sorted = runs.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |quarters: usize| sorted[(sorted.len() - 1) * quarters / 4];
        Self { median: at(2), lower: at(1), upper: at(3), runs: runs.len() }
    }

    /// Half of the runs lie within so much of the median, as a fraction of it.
    pub(crate) fn spread(&self) -> f64 {
        if self.median == 0.0 { 0.0 } else { ((self.upper - self.lower) / 2.0 / self.median).abs() }
    }
}

/// What a row is compared with, measured in turns with it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Reference {
    pub(crate) name: String,
    pub(crate) figure: Figure,
    /// The row's own runs by the reference's: the median of the pairs, as a disturbance lasts longer than one turn.
    pub(crate) ratio: f64,
}

/// What a figure, or its ratio to the reference, should be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Goal {
    AtMost(f64),
    TimesAtMost(f64),
    TimesAtLeast(f64),
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtMost(most) => write!(f, "≤ {most}"),
            Self::TimesAtMost(times) => write!(f, "≤ {times:.2} ×"),
            Self::TimesAtLeast(times) => write!(f, "≥ {times:.1} ×"),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    /// Rows of one group are shown together: "established", "on the wire, new flows".
    pub(crate) group: String,
    pub(crate) name: String,
    pub(crate) unit: Unit,
    pub(crate) figure: Figure,
    pub(crate) reference: Option<Reference>,
    pub(crate) goal: Option<Goal>,
    runs: Vec<f64>,
}

impl Row {
    /// # Panics
    /// Without a run.
    pub(crate) fn new(group: &str, name: &str, unit: Unit, runs: &[f64]) -> Self {
        let (group, name) = (group.to_owned(), name.to_owned());
        Self { group, name, unit, figure: Figure::of(runs), reference: None, goal: None, runs: runs.to_vec() }
    }

    /// Compares with runs of something else that took turns with these: as many of them.
    #[must_use]
    pub(crate) fn beside(mut self, name: &str, runs: &[f64]) -> Self {
        let ratios: Vec<f64> = self.runs.iter().zip(runs).map(|(own, other)| own / other).collect();
        let ratio = Figure::of(&ratios).median;
        self.reference = Some(Reference { name: name.to_owned(), figure: Figure::of(runs), ratio });
        self
    }

    #[must_use]
    pub(crate) fn goal(mut self, goal: Goal) -> Self {
        self.goal = Some(goal);
        self
    }

    pub(crate) fn ratio(&self) -> Option<f64> {
        self.reference.as_ref().map(|reference| reference.ratio)
    }

    pub(crate) fn met(&self) -> Option<bool> {
        Some(match self.goal? {
            Goal::AtMost(most) => self.figure.median <= most,
            Goal::TimesAtMost(times) => self.ratio()? <= times,
            Goal::TimesAtLeast(times) => self.ratio()? >= times,
        })
    }
}
