//! Budgets that a machine records with `UPDATE_BUDGETS=1`: it keeps no files, so they are written
//! here from its output.

use std::fs;

use anyhow::{Context, Result, ensure};

use crate::cargo;

/// The variable that makes the suite `budgets` record its measurements.
pub(super) const VARIABLE: &str = "UPDATE_BUDGETS";
/// The mark before a file, with its name from the root of the workspace; the next one is the mark
/// after it. tests/tests/budgets/recorded.rs prints them.
const BEGIN: &str = "--- BEGIN ";
const END: &str = "--- END ";
/// The folder of budgets: no other file is written on a machine's request.
const FOLDER: &str = "tests/testdata/budgets/";

/// The file that is being printed.
#[derive(Default)]
pub(super) struct Recorder {
    open: Option<(String, String)>,
}

impl Recorder {
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

    /// Does the same as [`Self::line`], and writes the file if recording was requested.
    ///
    /// # Errors
    /// The file cannot be written, or is not one of the budgets.
    pub(super) fn follow(&mut self, line: &str) -> Result<()> {
        let Some((file, text)) = self.line(line) else { return Ok(()) };
        if std::env::var_os(VARIABLE).is_none() {
            return Ok(());
        }
        let name = file.strip_prefix(FOLDER).filter(|name| !name.contains('/'));
        ensure!(name.is_some(), "{file} is not in {FOLDER}");
        fs::write(cargo::root().join(&file), text).with_context(|| format!("{file} cannot be written"))?;
        println!("vm: {file} is written");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_taken_from_between_its_marks() {
        let mut recorder = Recorder::default();
        let lines =
            ["test a ... --- BEGIN x", "--- BEGIN tests/testdata/budgets/6.12.txt", "# by hand", "bytes a 1"];
        assert!(lines.iter().all(|line| recorder.line(line).is_none()));
        let file = recorder.line("--- END tests/testdata/budgets/6.12.txt").unwrap();
        assert_eq!(file, ("tests/testdata/budgets/6.12.txt".to_owned(), "# by hand\nbytes a 1\n".to_owned()));
        assert!(recorder.line("bytes b 2").is_none() && recorder.line(END).is_none());
    }
}
