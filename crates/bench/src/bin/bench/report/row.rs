//! One row of the report: the measured quantity, its spread, its reference, and its goal.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{noise, unit::Unit};

/// The runs of one program: their median, and their quartiles as the spread.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Figure {
    pub(crate) median: f64,
    pub(crate) lower: f64,
    pub(crate) upper: f64,
    pub(crate) runs: usize,
}

impl Figure {
    /// Computes the figure of runs.
    ///
    /// # Panics
    /// There is no run.
    pub(crate) fn of(runs: &[f64]) -> Self {
        let mut sorted = runs.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |quarters: usize| sorted[(sorted.len() - 1) * quarters / 4];
        Self { median: at(2), lower: at(1), upper: at(3), runs: runs.len() }
    }

    /// Returns the fraction of the median within which half of the runs lie.
    pub(crate) fn spread(&self) -> f64 {
        if self.median == 0.0 { 0.0 } else { ((self.upper - self.lower) / 2.0 / self.median).abs() }
    }
}

/// Reference of a row, measured in turns with it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Reference {
    pub(crate) name: String,
    pub(crate) figure: Figure,
    /// Ratio of the row's own runs to the reference's, pair by pair, as a disturbance lasts longer
    /// than one turn.
    pub(crate) ratio: Figure,
    runs: Vec<f64>,
}

/// Goal of a figure, or of its ratio to the reference.
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
    /// Group of rows that are shown together: "established", "on the wire, new flows".
    pub(crate) group: String,
    pub(crate) name: String,
    pub(crate) unit: Unit,
    pub(crate) figure: Figure,
    pub(crate) reference: Option<Reference>,
    pub(crate) goal: Option<Goal>,
    /// The spread, as a fraction, beyond which the row is noisy.
    pub(crate) bound: f64,
    /// Fraction of the CPU time during these runs that the hypervisor gave to other guests.
    pub(crate) stolen: f64,
    /// Number of times that it was measured, because it was noisy.
    pub(crate) attempts: u32,
    runs: Vec<f64>,
}

impl Row {
    /// Makes a row from runs.
    ///
    /// # Panics
    /// There is no run.
    pub(crate) fn new(group: &str, name: &str, unit: Unit, runs: &[f64]) -> Self {
        let (group, name) = (group.to_owned(), name.to_owned());
        let figure = Figure::of(runs);
        Self {
            group,
            name,
            unit,
            figure,
            reference: None,
            goal: None,
            bound: noise::bound(unit, figure.median),
            stolen: 0.0,
            attempts: 1,
            runs: runs.to_vec(),
        }
    }

    /// Sets another bound of the spread than [`noise::bound`], as a fraction of the median.
    #[must_use]
    pub(crate) fn bound(mut self, bound: f64) -> Self {
        self.bound = bound;
        self
    }

    /// Adds a reference whose runs took turns with these; there must be as many of them.
    #[must_use]
    pub(crate) fn beside(mut self, name: &str, runs: &[f64]) -> Self {
        let ratios: Vec<f64> = self.runs.iter().zip(runs).map(|(own, other)| own / other).collect();
        let (name, figure, ratio) = (name.to_owned(), Figure::of(runs), Figure::of(&ratios));
        self.reference = Some(Reference { name, figure, ratio, runs: runs.to_vec() });
        self
    }

    #[must_use]
    pub(crate) fn goal(mut self, goal: Goal) -> Self {
        self.goal = Some(goal);
        self
    }

    pub(crate) fn ratio(&self) -> Option<f64> {
        self.reference.as_ref().map(|reference| reference.ratio.median)
    }

    /// Returns the name of the reference; empty if there is none.
    pub(crate) fn beside_name(&self) -> &str {
        self.reference.as_ref().map_or("", |reference| &reference.name)
    }

    /// Returns the spread of the figure, or that of its ratio if it is larger.
    pub(crate) fn spread(&self) -> f64 {
        let ratio = self.reference.as_ref().map_or(0.0, |reference| reference.ratio.spread());
        self.figure.spread().max(ratio)
    }

    /// Whether the runs differ so much that the figure should not be trusted.
    pub(crate) fn is_noisy(&self) -> bool {
        self.spread() > self.bound || self.stolen > noise::MOST_STOLEN
    }

    /// Returns the figure that would just meet the goal.
    pub(crate) fn limit(&self) -> Option<f64> {
        Some(match self.goal? {
            Goal::AtMost(most) => most,
            Goal::TimesAtMost(times) | Goal::TimesAtLeast(times) => {
                self.reference.as_ref()?.figure.median * times
            }
        })
    }

    pub(crate) fn met(&self) -> Option<bool> {
        Some(match self.goal? {
            Goal::AtMost(most) => self.figure.median <= most,
            Goal::TimesAtMost(times) => self.ratio()? <= times,
            Goal::TimesAtLeast(times) => self.ratio()? >= times,
        })
    }
}
