//! Rows of the table of network plugins that a machine prints with `UPDATE_DOCS=1`: it keeps no
//! files, so they are written here.

use std::fs;

use anyhow::{Context, Result};

use crate::cargo;

/// The variable that makes the suite `cni` print its results.
pub(super) const VARIABLE: &str = "UPDATE_DOCS";
/// The mark before a row; tests/tests/cni/table.rs prints it.
const ROW: &str = "--- ROW ";
const PAGE: &str = "docs/compatibility.md";
const BEGIN: &str = "<!-- made from runs: cni -->\n";
const END: &str = "<!-- end -->";

/// Processes a line of the console, and writes its row if that was requested.
///
/// # Errors
/// The page cannot be read or written, or has no such table.
pub(super) fn follow(line: &str) -> Result<()> {
    let Some(row) = line.strip_prefix(ROW) else { return Ok(()) };
    if std::env::var_os(VARIABLE).is_none_or(|value| value != "1") {
        return Ok(());
    }
    let path = cargo::root().join(PAGE);
    let page = fs::read_to_string(&path).with_context(|| format!("{PAGE} cannot be read"))?;
    let page = with_row(&page, row).with_context(|| format!("{PAGE} has no place for {row}"))?;
    fs::write(&path, page).with_context(|| format!("{PAGE} cannot be written"))?;
    println!("vm: {PAGE} has a new row");
    Ok(())
}

/// Returns the page with the row, which replaces one for the same layout and attach mode, or is
/// inserted in order.
fn with_row(page: &str, row: &str) -> Option<String> {
    let key = |row: &str| row.splitn(4, '|').take(3).collect::<Vec<_>>().join("|");
    let (before, rest) = page.split_once(BEGIN)?;
    let (table, after) = rest.split_once(END)?;
    let (head, rows) = table.split_at(table.match_indices('\n').nth(1)?.0 + 1);
    let mut rows: Vec<&str> = rows.lines().filter(|line| key(line) != key(row)).collect();
    rows.push(row);
    rows.sort_unstable();
    row.starts_with("| `").then(|| format!("{before}{BEGIN}{head}{}\n{END}{after}", rows.join("\n")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_takes_its_place() {
        let page = |rows: &str| format!("text\n{BEGIN}| layout | mode |\n|---|---|\n{rows}{END}\nmore\n");
        let before = page("| `a` | `tc` | 1 |\n| `c` | `tc` | 1 |\n");
        let replaced = page("| `a` | `tc` | 2 |\n| `c` | `tc` | 1 |\n");
        assert_eq!(with_row(&before, "| `a` | `tc` | 2 |").unwrap(), replaced);
        let added = page("| `a` | `tc` | 1 |\n| `b` | `tc` | 2 |\n| `c` | `tc` | 1 |\n");
        assert_eq!(with_row(&before, "| `b` | `tc` | 2 |").unwrap(), added);
        assert_eq!(with_row(&before, "no row"), None);
        assert_eq!(with_row("no table", "| `b` | `tc` | 2 |"), None);
    }
}
