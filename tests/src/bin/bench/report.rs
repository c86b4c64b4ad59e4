//! What was measured.

mod row;
mod table;

use std::collections::BTreeMap;

use anyhow::Result;
use serde::{Deserialize, Serialize};

pub(crate) use self::row::{Goal, Row, Unit};
use super::selection::Selection;

/// A row that could not be measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Missing {
    pub(crate) group: String,
    pub(crate) name: String,
    pub(crate) reason: String,
}

#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Report {
    /// What the figures depend on, by name.
    pub(crate) environment: BTreeMap<String, String>,
    pub(crate) rows: Vec<Row>,
    pub(crate) missing: Vec<Missing>,
    /// What every random choice of the run starts from.
    pub(crate) seed: u64,
    #[serde(skip)]
    selection: Selection,
}

impl Report {
    /// Only finds out what could be measured.
    pub(crate) fn listing() -> Self {
        Self { selection: Selection::listing(), ..Self::default() }
    }

    pub(crate) fn new(selection: Selection, seed: u64) -> Self {
        Self { selection, seed, ..Self::default() }
    }

    pub(crate) fn selection(&self) -> &Selection {
        &self.selection
    }

    /// Whether a row is to be measured. A part asks about each row that it could measure at this effort, always, and
    /// before anything is set up: `--list` is made of these questions.
    pub(crate) fn wants(&mut self, group: &str, name: &str) -> bool {
        self.selection.wants(group, name)
    }

    /// Notes what figures depend on: a device's offloads, the way a program was attached.
    pub(crate) fn note(&mut self, key: &str, value: impl ToString) {
        self.environment.insert(key.to_owned(), value.to_string());
    }

    /// Says that a row cannot be measured, and why.
    pub(crate) fn skip(&mut self, group: &str, name: &str, reason: impl ToString) {
        let (group, name, reason) = (group.to_owned(), name.to_owned(), reason.to_string());
        eprintln!("  {group}, {name}: not measured: {reason}");
        self.missing.push(Missing { group, name, reason });
    }

    /// Adds the rows that `measure` makes: those that took turns with each other.
    ///
    /// # Errors
    /// Those of `measure`.
    pub(crate) fn measure(&mut self, mut measure: impl FnMut() -> Result<Vec<Row>>) -> Result<()> {
        measure()?.into_iter().for_each(|row| self.add(row));
        Ok(())
    }

    pub(crate) fn add(&mut self, row: Row) {
        let ratio = row.ratio().map(|ratio| format!(", {ratio:.2} × {}", beside(&row)));
        eprintln!(
            "  {}, {}: {} {}{}",
            row.group,
            row.name,
            table::short(row.figure.median),
            row.unit.symbol(),
            ratio.unwrap_or_default()
        );
        self.rows.push(row);
    }
}

fn beside(row: &Row) -> &str {
    row.reference.as_ref().map_or("", |reference| &reference.name)
}
