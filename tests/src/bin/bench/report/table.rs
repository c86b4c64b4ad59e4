//! The report as a table on a terminal.

use std::fmt;

use super::{Report, Row};

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut group = "";
        for row in &self.rows {
            if row.group != group {
                group = &row.group;
                writeln!(
                    f,
                    "\n{group:<54} {:>10} {:>5} {:>20} {:>6}  {:<9} met",
                    "median", "±", "beside", "ratio", "goal"
                )?;
            }
            line(f, row)?;
        }
        Ok(())
    }
}

fn line(f: &mut fmt::Formatter<'_>, row: &Row) -> fmt::Result {
    let dash = || "–".to_owned();
    let beside = row
        .reference
        .as_ref()
        .map_or_else(dash, |reference| format!("{} {}", reference.name, short(reference.figure.median)));
    writeln!(
        f,
        "  {:<52} {:>10} {:>4.0}% {beside:>20} {:>6}  {:<9} {}",
        row.name,
        format!("{} {}", short(row.figure.median), row.unit.symbol()),
        row.figure.spread() * 100.0,
        row.ratio().map_or_else(dash, |ratio| format!("{ratio:.2}")),
        row.goal.map_or_else(dash, |goal| goal.to_string()),
        row.met().map_or("–", |met| if met { "yes" } else { "NO" }),
    )
}

/// Three digits that count.
pub(super) fn short(number: f64) -> String {
    let digits = if number.abs() >= 100.0 {
        0
    } else if number.abs() >= 10.0 {
        1
    } else {
        2
    };
    format!("{number:.digits$}")
}
