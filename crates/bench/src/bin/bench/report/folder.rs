//! Folder of a report, with `results.json` and `report.html`.

use std::{
    env, fs,
    os::unix::fs::chown,
    path::{Path, PathBuf},
    process::Command,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, ensure};
use traffic_policy_lb::page::frame;

use super::{FORMAT, Report, Run};

const JSON: &str = "results.json";
const PAGE: &str = "report.html";
const WORKSPACE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Returns the facts about a run at its beginning.
pub(super) fn run(seed: u64) -> Run {
    let commit = git(&["rev-parse", "HEAD"]).unwrap_or_default();
    let changes = git(&["status", "--porcelain", "--untracked-files=no"]);
    Run {
        date: utc(SystemTime::now()),
        command: env::args().skip(1).fold("cargo xtask bench".to_owned(), |line, word| line + " " + &word),
        dirty: changes.is_some_and(|changes| !changes.is_empty()),
        commit,
        seed,
        ..Run::default()
    }
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").arg("-C").arg(WORKSPACE).args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Formats a time per RFC 3339, in whole seconds.
fn utc(time: SystemTime) -> String {
    frame::utc(time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()))
}

impl Report {
    /// Returns the default folder of the report: below the folder of this program.
    pub(crate) fn default_folder(&self) -> Result<PathBuf> {
        let own = env::current_exe().context("this program's own path is unknown")?;
        let target = own.ancestors().nth(2).context("this program is not in a target folder")?;
        let commit = self.run.commit.get(..10).unwrap_or("unknown");
        let dirty = if self.run.dirty { "-dirty" } else { "" };
        let date = self.run.date.replace([':', '-'], "");
        Ok(target.join("bench").join(format!("{date}-{commit}{dirty}")))
    }

    /// Writes the folder.
    pub(crate) fn write(&self, folder: &Path) -> Result<()> {
        fs::create_dir_all(folder).with_context(|| format!("{} cannot be made", folder.display()))?;
        let files = [(JSON, format!("{:#}\n", serde_json::json!(self))), (PAGE, self.page())];
        for (name, text) in files {
            let path = folder.join(name);
            fs::write(&path, text).with_context(|| format!("{} cannot be written", path.display()))?;
            give_back(&path);
        }
        give_back(folder);
        folder.parent().filter(|parent| parent.ends_with("bench")).into_iter().for_each(give_back);
        Ok(())
    }

    /// Reads a folder, or the JSON in it.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let file = if path.is_dir() { path.join(JSON) } else { path.to_owned() };
        let text = fs::read_to_string(&file).with_context(|| format!("{} cannot be read", file.display()))?;
        let value: serde_json::Value =
            serde_json::from_str(&text).with_context(|| format!("{} is not JSON", file.display()))?;
        let format = value.get("format").and_then(serde_json::Value::as_u64).unwrap_or(0);
        ensure!(
            format == u64::from(FORMAT),
            "{} has format {format}, this program reads {FORMAT}: compare with the program that wrote it",
            file.display()
        );
        serde_json::from_value(value).with_context(|| format!("{} is no report", file.display()))
    }
}

/// Gives files that were made under sudo to the calling user.
fn give_back(path: &Path) {
    let id = |name: &str| env::var(name).ok()?.parse::<u32>().ok();
    if let (Some(user), Some(group)) = (id("SUDO_UID"), id("SUDO_GID")) {
        // The file remains in any case, owned by root.
        let _ = chown(path, Some(user), Some(group));
    }
}
