//! The figures, and what they should be.

use std::fmt;

use serde_json::{Value, json};

/// What a figure should be at most.
#[derive(Clone, Copy)]
pub(crate) enum Goal {
    /// Times the floor.
    Times(f64),
    Nanoseconds(f64),
}

struct Row {
    name: String,
    ns: f64,
    floor: Option<f64>,
    goal: Option<Goal>,
}

#[derive(Default)]
pub(crate) struct Report(Vec<Row>);

impl Report {
    pub(crate) fn add(&mut self, name: &str, ns: f64, floor: Option<f64>, goal: Option<Goal>) {
        eprintln!("  {name}: {ns:.1} ns");
        self.0.push(Row { name: name.to_owned(), ns, floor, goal });
    }

    pub(crate) fn json(&self) -> Value {
        let row = |row: &Row| {
            json!({
                "name": row.name,
                "ns": row.ns,
                "floor_ns": row.floor,
                "ratio": row.ratio(),
                "goal": row.goal.map(|goal| goal.to_string()),
                "met": row.met(),
            })
        };
        self.0.iter().map(row).collect()
    }
}

impl Row {
    fn ratio(&self) -> Option<f64> {
        self.floor.map(|floor| self.ns / floor)
    }

    fn met(&self) -> Option<bool> {
        Some(match self.goal? {
            Goal::Times(times) => self.ratio()? <= times,
            Goal::Nanoseconds(most) => self.ns <= most,
        })
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Times(times) => write!(f, "≤ {times:.2} × floor"),
            Self::Nanoseconds(most) => write!(f, "≤ {most} ns"),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dash = || "–".to_owned();
        writeln!(
            f,
            "{:<52} {:>8} {:>8} {:>6}  {:<15} met",
            "nanoseconds per packet", "ours", "floor", "ratio", "goal"
        )?;
        for row in &self.0 {
            writeln!(
                f,
                "{:<52} {:>8.1} {:>8} {:>6}  {:<15} {}",
                row.name,
                row.ns,
                row.floor.map_or_else(dash, |floor| format!("{floor:.1}")),
                row.ratio().map_or_else(dash, |ratio| format!("{ratio:.2}")),
                row.goal.map_or_else(dash, |goal| goal.to_string()),
                row.met().map_or("–", |met| if met { "yes" } else { "NO" }),
            )?;
        }
        writeln!(
            f,
            "\nThe floor only parses, looks one flow up in a hash of the same size and content, and translates (IPv4, TCP, XDP);\n\
             for a new flow it looks up Service and endpoint and inserts two halves. Figures are lower quartiles of interleaved runs,\n\
             less the cost of the program that supplies the packets. Compare ratios, not nanoseconds, between machines."
        )
    }
}
