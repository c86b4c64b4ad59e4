//! The report as a table on a terminal.

use std::fmt;

use super::{Report, Row};

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widest = self.rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0);
        let mut group = "";
        for row in &self.rows {
            if row.group != group {
                group = &row.group;
                writeln!(
                    f,
                    "\n{group:<width$} {:>10} {:>5}  {:<26} {:>6}  {:<9} met",
                    "median",
                    "±",
                    "beside",
                    "ratio",
                    "goal",
                    width = widest + 2
                )?;
            }
            line(f, row, widest)?;
        }
        if !self.missing.is_empty() {
            writeln!(f, "\nnot measured")?;
        }
        for missing in &self.missing {
            writeln!(f, "  {}, {}: {}", missing.group, missing.name, missing.reason)?;
        }
        writeln!(f)?;
        for warning in &self.warnings {
            writeln!(f, "Warning: {warning}")?;
        }
        if let Some(noise) = self.noise() {
            writeln!(f, "{noise}")?;
        }
        Ok(())
    }
}

impl Report {
    /// Returns sentences on noisy rows, if there are any.
    pub(super) fn noise(&self) -> Option<String> {
        let noisy: Vec<_> = self.rows.iter().filter(|row| row.is_noisy()).collect();
        if noisy.is_empty() {
            return None;
        }
        let stolen = noisy.iter().filter(|row| row.stolen > super::noise::MOST_STOLEN).count();
        let mut text = format!(
            "{} of {} rows are noisy (marked ~), each measured twice: their runs differ by more than the bound that the row states, so differences of that size between rows, or to their goals, mean nothing. ",
            noisy.len(),
            self.rows.len()
        );
        if stolen > 0 {
            text += &format!("From {stolen} of them the hypervisor took CPU time for other machines. ");
        }
        Some(
            text + "Stop what else runs, on other virtual machines of this host too, and measure these rows again by name; a fixed CPU frequency and isolated CPUs help.",
        )
    }
}

fn line(f: &mut fmt::Formatter<'_>, row: &Row, widest: usize) -> fmt::Result {
    let dash = || "–".to_owned();
    let beside = row
        .reference
        .as_ref()
        .map_or_else(dash, |reference| format!("{} {}", reference.name, short(reference.figure.median)));
    writeln!(
        f,
        "  {:<widest$} {:>10} {:>4.0}%{} {beside:<26} {:>6}  {:<9} {}",
        row.name,
        format!("{} {}", short(row.figure.median), row.unit.symbol()),
        row.spread() * 100.0,
        if row.is_noisy() { "~" } else { " " },
        row.ratio().map_or_else(dash, |ratio| format!("{ratio:.2}")),
        row.goal.map_or_else(dash, |goal| goal.to_string()),
        row.met().map_or("–", |met| if met { "yes" } else { "NO" }),
    )
}

/// Formats a number with three significant digits.
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

/// Formats a number with one decimal and its sign.
pub(super) fn signed(number: f64) -> String {
    format!("{number:+.1}")
}
