//! Files of this repository that a machine records with `UPDATE_BUDGETS=1` or `UPDATE_DOCS=1`. The
//! machine keeps no files, so its tests print what belongs into them, and it is written here.

use std::{env, fs};

use anyhow::{Context, Result, ensure};

use crate::cargo;

/// The variable that makes the suite `budgets` record its measurements.
const BUDGETS: &str = "UPDATE_BUDGETS";
/// The variable that makes the suite `cni` print its results.
const DOCS: &str = "UPDATE_DOCS";
/// The variables that machines get from the host.
pub(super) const VARIABLES: [&str; 2] = [BUDGETS, DOCS];

/// The mark before a file, with its name from the root of the workspace; the next one is the mark
/// after it. crates/packets/tests/budgets/recorded.rs prints them.
const BEGIN: &str = "--- BEGIN ";
const END: &str = "--- END ";
/// The folder of budgets: no other file is written on a machine's request.
const FOLDER: &str = "crates/packets/testdata/budgets/";

/// The mark before a row of the table of network plugins; tests/tests/cni/table.rs prints it.
const ROW: &str = "--- ROW ";
const PAGE: &str = "docs/compatibility.md";
const TABLE: &str = "<!-- made from runs: cni -->\n";
const TABLE_END: &str = "<!-- end -->";

/// The file that is being printed.
#[derive(Default)]
pub(super) struct Recorder {
    open: Option<(String, String)>,
}

impl Recorder {
    /// Processes a line of the console, and writes the file or the row that ends with it if
    /// recording was requested.
    ///
    /// # Errors
    /// The file cannot be written or is not one of the budgets, or the page has no such table.
    pub(super) fn follow(&mut self, line: &str) -> Result<()> {
        if let Some((file, text)) = self.line(line)
            && env::var_os(BUDGETS).is_some()
        {
            let name = file.strip_prefix(FOLDER).filter(|name| !name.contains('/'));
            ensure!(name.is_some(), "{file} is not in {FOLDER}");
            return write(&file, &text);
        }
        if let Some(row) = line.strip_prefix(ROW)
            && env::var_os(DOCS).is_some_and(|value| value == "1")
        {
            let page = fs::read_to_string(cargo::root().join(PAGE));
            let page = page.with_context(|| format!("{PAGE} cannot be read"))?;
            return write(
                PAGE,
                &with_row(&page, row).with_context(|| format!("{PAGE} has no place for {row}"))?,
            );
        }
        Ok(())
    }

    /// Processes a line of the console. Returns the file and its text after the last line of one.
    fn line(&mut self, line: &str) -> Option<(String, String)> {
        if let Some(file) = line.strip_prefix(BEGIN) {
            self.open = Some((file.to_owned(), String::new()));
        } else if line.starts_with(END) {
            return self.open.take();
        } else if let Some((_, text)) = &mut self.open {
            text.push_str(line);
            text.push('\n');
        }
        None
    }
}

fn write(file: &str, text: &str) -> Result<()> {
    fs::write(cargo::root().join(file), text).with_context(|| format!("{file} cannot be written"))?;
    println!("vm: {file} is written");
    Ok(())
}

/// Returns the page with the row, which replaces one for the same layout and modes, or is inserted
/// in order.
fn with_row(page: &str, row: &str) -> Option<String> {
    let key = |row: &str| row.splitn(5, '|').take(4).collect::<Vec<_>>().join("|");
    let (before, rest) = page.split_once(TABLE)?;
    let (table, after) = rest.split_once(TABLE_END)?;
    let (head, rows) = table.split_at(table.match_indices('\n').nth(1)?.0 + 1);
    let mut rows: Vec<&str> = rows.lines().filter(|line| key(line) != key(row)).collect();
    rows.push(row);
    rows.sort_unstable();
    row.starts_with("| `").then(|| format!("{before}{TABLE}{head}{}\n{TABLE_END}{after}", rows.join("\n")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_taken_from_between_its_marks() {
        let mut recorder = Recorder::default();
        let lines = [
            "test a ... --- BEGIN x",
            "--- BEGIN crates/packets/testdata/budgets/6.12.txt",
            "# by hand",
            "bytes a 1",
        ];
        assert!(lines.iter().all(|line| recorder.line(line).is_none()));
        let file = recorder.line("--- END crates/packets/testdata/budgets/6.12.txt").unwrap();
        assert_eq!(
            file,
            ("crates/packets/testdata/budgets/6.12.txt".to_owned(), "# by hand\nbytes a 1\n".to_owned())
        );
        assert!(recorder.line("bytes b 2").is_none() && recorder.line(END).is_none());
    }

    #[test]
    fn a_row_takes_its_place() {
        let page =
            |rows: &str| format!("text\n{TABLE}| layout | mode |\n|---|---|\n{rows}{TABLE_END}\nmore\n");
        let before = page("| `a` | `tc` | `stack` | 1 |\n| `c` | `tc` | `stack` | 1 |\n");
        let replaced = page("| `a` | `tc` | `stack` | 2 |\n| `c` | `tc` | `stack` | 1 |\n");
        assert_eq!(with_row(&before, "| `a` | `tc` | `stack` | 2 |").unwrap(), replaced);
        let added = page(
            "| `a` | `tc` | `stack` | 1 |\n| `b` | `tc` | `stack` | 2 |\n| `c` | `tc` | `stack` | 1 |\n",
        );
        assert_eq!(with_row(&before, "| `b` | `tc` | `stack` | 2 |").unwrap(), added);
        assert_eq!(with_row(&before, "no row"), None);
        assert_eq!(with_row("no table", "| `b` | `tc` | `stack` | 2 |"), None);
    }
}
