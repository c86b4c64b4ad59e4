//! The table in docs/compatibility.md, with a row for each run.
//!
//! Runs are tests that may run alone, so each compares or writes its own row only. The last cell is
//! the date of the run that wrote it, and its kernel. Changes to the disk of an emulated machine
//! are lost, so the test prints the row, and `cargo xtask vm test` writes it on the host.

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::{env, fs};

use crate::policies;

const PAGE: &str = "docs/compatibility.md";
const BEGIN: &str = "<!-- made from runs: cni -->\n";
const END: &str = "<!-- end -->";

/// The result of one layout with one value of `--attach` and one of `--local-delivery`.
pub struct Row {
    pub layout: &'static str,
    pub attach: &'static str,
    pub delivery: &'static str,
    /// The right answers among 24 requests from outside.
    pub matrix: usize,
    /// The number of 4 combinations that reach a ClusterIP.
    pub sockets: usize,
    /// The reported MTU of each family.
    pub told: [Option<u16>; 2],
    pub lost: Option<String>,
    /// The right results with network policies by nftables and by iptables.
    pub policies: [usize; 2],
}

impl Row {
    fn begin(&self) -> String {
        format!("| `{}` | `{}` | `{}` |", self.layout, self.attach, self.delivery)
    }

    /// The row without the date.
    fn text(&self) -> String {
        let [v4, v6] = self.told.map(|mtu| mtu.map_or("not told".to_owned(), |mtu| mtu.to_string()));
        let lost = if self.lost.is_none() { "nothing lost" } else { "loss" };
        let (begin, matrix, sockets) = (self.begin(), self.matrix, self.sockets);
        let policies = self.policies.map(|right| format!("{right} of {}", policies::ALL)).join(" | ");
        format!("{begin} {matrix} of 24 | {sockets} of 4 | {v4}, {v6} | {lost} | {policies} |")
    }
}

/// Compares the row with that of the page; with `UPDATE_DOCS=1`, writes it instead.
pub fn compare(row: &Row) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _lock = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join(PAGE);
    let page = fs::read_to_string(&path).unwrap();
    let begin = page.find(BEGIN).expect("the page has the table") + BEGIN.len();
    let end = begin + page[begin..].find(END).expect("the table ends");
    let rows: Vec<_> = page[begin..end].lines().filter(|line| line.starts_with('|')).collect();
    let found = rows.iter().position(|line| line.starts_with(&row.begin()));
    if env::var_os("UPDATE_DOCS").is_none_or(|value| value != "1") {
        let written = found.map_or("no such row", |at| rows[at]);
        let hint = "`UPDATE_DOCS=1 cargo xtask test cni` (or `… vm test …`) writes it anew";
        assert!(written.starts_with(&row.text()), "{PAGE} has {written}, seen was {}: {hint}", row.text());
        return;
    }
    let new = format!("{} {} |", row.text(), today());
    // Printed to stdout directly, as the test harness would capture it.
    std::io::stdout().write_all(format!("\n--- ROW {new}\n").as_bytes()).unwrap();
    let mut rows: Vec<_> = rows.into_iter().map(str::to_owned).collect();
    match found {
        Some(at) => rows[at] = new,
        None => rows.push(new),
    }
    // The head of the table stays in front.
    rows[2..].sort();
    let page = format!("{}{}\n{}", &page[..begin], rows.join("\n"), &page[end..]);
    fs::write(&path, page).unwrap();
}

/// The date, in UTC, and the kernel.
fn today() -> String {
    let said = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    let release = said("uname", &["-r"]);
    let series: Vec<_> = release.split(['.', '-', '+']).take(2).collect();
    format!("{}, Linux {}", said("date", &["-u", "+%F"]), series.join("."))
}
