//! What was measured.

mod row;
mod table;

use serde::{Deserialize, Serialize};

pub(crate) use self::row::{Goal, Row, Unit};

#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) rows: Vec<Row>,
}

impl Report {
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
