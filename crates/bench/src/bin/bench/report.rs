//! Results of a bench run.

mod compare;
mod folder;
mod machine;
pub(crate) mod noise;
mod page;
mod plot;
mod row;
mod table;
mod unit;

use std::{
    collections::BTreeMap,
    fmt::Display,
    time::{Duration, Instant},
};

use anyhow::Result;
use serde::{Deserialize, Serialize};

use self::noise::Clock;
pub(crate) use self::{
    compare::compare,
    row::{Goal, Row},
    unit::Unit,
};
use super::{Effort, selection::Selection};

/// Version of the JSON.
const FORMAT: u32 = 1;

/// A row that could not be measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Missing {
    pub(crate) group: String,
    pub(crate) name: String,
    pub(crate) reason: String,
}

/// Time, sources and conditions of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Run {
    /// Date in UTC, RFC 3339.
    pub(crate) date: String,
    pub(crate) command: String,
    /// Commit of the sources; empty if unknown.
    pub(crate) commit: String,
    /// Whether the sources differ from the commit.
    pub(crate) dirty: bool,
    pub(crate) full: bool,
    /// Seed of every random choice.
    pub(crate) seed: u64,
    pub(crate) seconds: f64,
    /// Fraction of the CPU time of the whole run that the hypervisor gave to other guests.
    pub(crate) stolen: f64,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) format: u32,
    pub(crate) run: Run,
    /// Conditions that the figures depend on, by name.
    pub(crate) environment: BTreeMap<String, String>,
    /// Reasons to doubt the figures, in sentences.
    pub(crate) warnings: Vec<String>,
    pub(crate) rows: Vec<Row>,
    pub(crate) missing: Vec<Missing>,
    #[serde(skip)]
    pub(crate) seed: u64,
    #[serde(skip)]
    selection: Selection,
    /// Whether the clock counts instructions.
    #[serde(skip)]
    counted: bool,
    #[serde(skip)]
    repeated: Duration,
    #[serde(skip)]
    began: Option<(Instant, Clock)>,
    /// CPU time when the last row was added.
    #[serde(skip)]
    since: Clock,
}

impl Report {
    fn empty(selection: Selection, seed: u64) -> Self {
        Self {
            format: FORMAT,
            run: Run { seed, ..Run::default() },
            environment: BTreeMap::new(),
            warnings: Vec::new(),
            rows: Vec::new(),
            missing: Vec::new(),
            seed,
            selection,
            counted: false,
            repeated: Duration::ZERO,
            began: None,
            since: Clock::now(),
        }
    }

    /// Makes a report that only collects what could be measured.
    pub(crate) fn listing() -> Self {
        Self::empty(Selection::listing(), 0)
    }

    /// Begins a run: reads the state of the machine and the sources.
    pub(crate) fn begin(selection: Selection, seed: u64, effort: Effort) -> Self {
        let mut report = Self::empty(selection, seed);
        report.environment = machine::environment();
        report.run = Run { full: effort.full, ..folder::run(seed) };
        report.counted = effort.counted;
        if effort.counted {
            // Neither other programs nor another machine's speed change a count.
        } else if let Some(busy) = noise::busy() {
            report.warn(format!(
                "the machine is not idle: {busy}; figures of a busy machine are too high, ratios less so"
            ));
        }
        report.began = Some((Instant::now(), Clock::now()));
        report
    }

    /// Concludes the run.
    pub(crate) fn end(&mut self) {
        if let Some((began, clock)) = self.began {
            self.run.seconds = began.elapsed().as_secs_f64();
            self.run.stolen = Clock::now().stolen_since(clock);
        }
        if self.run.stolen > noise::MOST_STOLEN {
            let percent = self.run.stolen * 100.0;
            self.warn(format!("the hypervisor gave {percent:.0} % of the CPU time to other machines"));
        }
        let missing: Vec<_> = self
            .selection
            .wanted()
            .filter(|(group, name)| {
                !self.rows.iter().any(|row| (&row.group, &row.name) == (group, name))
                    && !self.missing.iter().any(|row| (&row.group, &row.name) == (group, name))
            })
            .cloned()
            .collect();
        let reason = "the part that measures it ended before".to_owned();
        self.missing.extend(missing.into_iter().map(|(group, name)| Missing {
            group,
            name,
            reason: reason.clone(),
        }));
    }

    /// Returns a sentence for each row that was wanted and is missing, as found by [`Self::end`].
    pub(crate) fn unmeasured(&self) -> Vec<String> {
        let sentence = |Missing { group, name, reason }: &Missing| format!("{group}, {name}: {reason}");
        self.missing.iter().map(sentence).collect()
    }

    pub(crate) fn warn(&mut self, warning: String) {
        eprintln!("Warning: {warning}");
        self.warnings.push(warning);
    }

    pub(crate) fn selection(&self) -> &Selection {
        &self.selection
    }

    /// Whether a row is to be measured. A part queries every row that it could measure at this
    /// effort, always, before anything is set up: `--list` is made of these queries.
    pub(crate) fn wants(&mut self, group: &str, name: &str) -> bool {
        self.selection.wants(group, name)
    }

    /// Whether a row is to be measured that requires its group to be named, because it takes
    /// minutes. Otherwise the same as [`Self::wants`].
    pub(crate) fn wants_by_name(&mut self, group: &str, name: &str) -> bool {
        self.selection.wants_by_name(group, name)
    }

    /// Records a condition that figures depend on: a device's offloads, the mode in which a program
    /// was attached.
    pub(crate) fn note(&mut self, key: &str, value: impl Display) {
        self.environment.insert(key.to_owned(), value.to_string());
    }

    /// Records that a row cannot be measured, and why.
    pub(crate) fn skip(&mut self, group: &str, name: &str, reason: impl Display) {
        let (group, name, reason) = (group.to_owned(), name.to_owned(), reason.to_string());
        eprintln!("  {group}, {name}: not measured: {reason}");
        self.missing.push(Missing { group, name, reason });
    }

    /// Adds the rows that `measure` makes, which took turns with each other. If one of them is
    /// noisy, they are measured once more, and the quieter result is kept.
    pub(crate) fn measure(&mut self, mut measure: impl FnMut() -> Result<Vec<Row>>) -> Result<()> {
        let mut rows = attempt(&mut measure)?;
        if !self.counted && rows.iter().any(Row::is_noisy) && self.repeated < noise::REPEATS {
            let started = Instant::now();
            let again = attempt(&mut measure)?;
            self.repeated += started.elapsed();
            let noise = |rows: &[Row]| {
                let beyond = rows.iter().map(|row| row.spread() / row.bound);
                (rows.iter().filter(|row| row.is_noisy()).count(), beyond.fold(0.0, f64::max))
            };
            if noise(&again) <= noise(&rows) {
                rows = again;
            }
            rows.iter_mut().for_each(|row| row.attempts = 2);
        }
        for row in rows {
            self.push(row);
        }
        Ok(())
    }

    /// Adds a row that cannot be measured again.
    pub(crate) fn add(&mut self, mut row: Row) {
        row.stolen = Clock::now().stolen_since(self.since);
        self.push(row);
    }

    fn push(&mut self, mut row: Row) {
        if self.counted {
            row.unit = Unit::Instructions;
            // Goals apply to time.
            row.goal = None;
        }
        let ratio = row.ratio().map(|ratio| format!(", {ratio:.2} × {}", row.beside_name()));
        eprintln!(
            "  {}, {}: {} {}{}{}",
            row.group,
            row.name,
            table::short(row.figure.median),
            row.unit.symbol(),
            ratio.unwrap_or_default(),
            if row.is_noisy() { " (noisy)" } else { "" },
        );
        self.rows.push(row);
        self.since = Clock::now();
    }
}

/// Returns rows, with the time that was stolen from them.
fn attempt(measure: &mut impl FnMut() -> Result<Vec<Row>>) -> Result<Vec<Row>> {
    let began = Clock::now();
    let mut rows = measure()?;
    let stolen = Clock::now().stolen_since(began);
    rows.iter_mut().for_each(|row| row.stolen = stolen);
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: [&str; 4] = ["request", "reply", "at large", "behind it"];

    /// Missing rows are named even if their part stops before it queries them.
    #[test]
    fn rows_that_are_missing_are_named() {
        let mut offered = Report::listing();
        for name in ROWS {
            offered.wants("established", name);
        }
        offered.wants("wire", "kube-proxy");
        let selection = |words: &[&str]| {
            let words: Vec<_> = words.iter().map(|word| (*word).to_owned()).collect();
            Selection::of(&words, offered.selection()).unwrap()
        };
        let measured = |report: &mut Report, names: &[&str]| {
            for name in names {
                assert!(report.wants("established", name));
                report.rows.push(Row::new("established", name, Unit::Nanoseconds, &[1.0]));
            }
        };
        let mut report = Report::empty(selection(&["established"]), 0);
        measured(&mut report, &ROWS[..1]);
        report.skip("established", "reply", "one CPU");
        assert!(report.wants("established", "at large"));
        report.end();
        let ended = "the part that measures it ended before";
        assert_eq!(
            report.unmeasured(),
            [
                "established, reply: one CPU".to_owned(),
                format!("established, at large: {ended}"),
                format!("established, behind it: {ended}"),
            ]
        );
        let mut whole = Report::empty(selection(&["established"]), 0);
        measured(&mut whole, &ROWS);
        whole.end();
        assert_eq!(whole.unmeasured(), [""; 0]);
    }
}
