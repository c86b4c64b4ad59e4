//! Pages of `lb --html` in a real browser: they draw, their numbers are those of the JSON, they fit
//! on a phone, and a screen reader can use them. Needs Chromium. Pictures are left in `target/tmp`.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod cluster;
mod judgement;
mod large;
mod readme;
mod time;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tempfile::TempDir;
use traffic_policy_testing::browser::{Accessible, Tab};
use traffic_policy_testing::plugin;

/// Manifests, and the page that `lb` makes of them.
struct Case {
    folder: TempDir,
}

impl Case {
    fn new(manifests: &str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        fs::create_dir(folder.path().join("manifests"))?;
        fs::write(folder.path().join("manifests/all.yaml"), manifests)?;
        Ok(Self { folder })
    }

    fn page(&self) -> PathBuf {
        self.folder.path().join("page.html")
    }

    fn start(&self, arguments: &[&str], page: &Path) -> Result<Output> {
        let mut command = Command::new(plugin::program()?);
        command.arg("lb").args(arguments).arg("--manifests").arg(self.folder.path().join("manifests"));
        Ok(command.args(["--output", "json", "--html"]).arg(page).output()?)
    }

    /// Makes the page and returns the printed JSON. An error among the findings is not a failure
    /// here.
    fn make(&self, arguments: &[&str]) -> Result<Value> {
        let output = self.start(arguments, &self.page())?;
        let code = output.status.code();
        ensure!(matches!(code, Some(0 | 3)), "{code:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(serde_json::from_slice(&output.stdout)?)
    }
}

fn pictures() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

/// The cells of the table with this caption, row by row, without its header.
fn table(tab: &mut Tab<'_>, caption: &str) -> Result<Vec<Vec<String>>> {
    let caption = serde_json::to_string(caption)?;
    let cells = tab.evaluate(&format!(
        "[...document.querySelectorAll('table')].filter(table => table.caption.textContent === {caption})\
         .flatMap(table => [...table.tBodies[0].rows].map(row => [...row.cells].map(cell => cell.textContent)))"
    ))?;
    let rows: Vec<Vec<String>> = serde_json::from_value(cells)?;
    ensure!(!rows.is_empty(), "no table {caption}");
    Ok(rows)
}

/// The texts of elements, sorted.
fn texts(tab: &mut Tab<'_>, selector: &str) -> Result<Vec<String>> {
    let found = tab.evaluate(&format!(
        "[...document.querySelectorAll({selector:?})].map(one => one.textContent).sort()"
    ))?;
    Ok(serde_json::from_value(found)?)
}

fn embedded(tab: &mut Tab<'_>, id: &str) -> Result<Value> {
    let text = tab.evaluate(&format!("document.getElementById({id:?}).textContent"))?;
    Ok(serde_json::from_str(text.as_str().context("no text")?)?)
}

fn assert_named(read: &[Accessible], role: &str, name: &str) {
    let named: Vec<_> = read.iter().filter(|node| node.role == role).map(|node| &node.name).collect();
    assert!(named.iter().any(|found| *found == name), "no {role} {name:?} among {named:?}");
}

fn percent(share: &Value) -> Result<String> {
    Ok(format!("{:.1} %", share.as_f64().context("no share")? * 100.0))
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}
