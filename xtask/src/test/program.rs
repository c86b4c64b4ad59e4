//! The test programs that cargo builds, and the tests in each.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::PRIVILEGED;
use crate::{build, cargo};

/// The packages of the suites.
const SUITES: [&str; 2] = ["traffic-policy-packets", "traffic-policy-tests"];

/// A test program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Program {
    /// The name of the suite; for unit tests, `unit-` and the name of their package.
    pub(super) suite: String,
    /// Whether its tests need neither root nor a BPF toolchain.
    pub(super) unit: bool,
    path: PathBuf,
    /// The root of the package, in which cargo starts its tests.
    folder: PathBuf,
    privileged: bool,
}

impl Program {
    /// Builds the workspace, with the agent that tests start, and all test programs.
    ///
    /// # Errors
    /// The build failed; the compiler has printed the reason.
    pub(super) fn all() -> Result<Vec<Self>> {
        let mut command = build::with_tests();
        command
            .args(["--quiet", "--message-format=json-render-diagnostics"])
            .stderr(std::process::Stdio::inherit());
        let output = command.output().context("cargo cannot be started")?;
        if !output.status.success() {
            bail!("the build of the tests failed");
        }
        let said = String::from_utf8(output.stdout).context("cargo's messages are not text")?;
        let mut found: Vec<Self> = said.lines().filter_map(Self::of_message).collect();
        found.sort_by(|a, b| (&a.suite, &a.path).cmp(&(&b.suite, &b.path)));
        if found.is_empty() {
            bail!("cargo has named no test program");
        }
        Ok(found)
    }

    /// Returns the test program that one of cargo's messages is about.
    fn of_message(line: &str) -> Option<Self> {
        let message: Value = serde_json::from_str(line).ok()?;
        if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
            return None;
        }
        let path = PathBuf::from(message["executable"].as_str()?);
        let folder = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
        // `path+file:///…/testing#traffic-policy-testing@0.1.0`, or `…/xtask#0.1.0` where both
        // names are the same.
        let id = message["package_id"].as_str()?.rsplit('#').next()?;
        let package = match id.split_once('@') {
            Some((name, _)) => name,
            None => folder.file_name()?.to_str()?,
        };
        let integration = message["target"]["kind"][0] == "test";
        let suite = if integration {
            message["target"]["name"].as_str()?.to_owned()
        } else {
            format!("unit-{}", package.trim_start_matches("traffic-policy-"))
        };
        let unit = !SUITES.contains(&package);
        let privileged = PRIVILEGED.contains(&package);
        Some(Self { suite, unit, path, folder: folder.clone(), privileged })
    }

    #[cfg(test)]
    pub(super) fn named(suite: &str) -> Self {
        Self {
            suite: suite.to_owned(),
            unit: false,
            path: PathBuf::new(),
            folder: PathBuf::new(),
            privileged: false,
        }
    }

    /// Returns a program whose tests write into the folder when they begin and end.
    #[cfg(test)]
    pub(super) fn stand_in(folder: &Path) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/test/stand_in.sh");
        Self { path, folder: folder.to_owned(), ..Self::named("stand-in") }
    }

    /// Returns the names of its tests, including those that are marked `ignore`.
    ///
    /// # Errors
    /// The program cannot be started, or fails.
    pub(super) fn tests(&self) -> Result<Vec<String>> {
        let output = Command::new(&self.path).args(["--list", "--format", "terse"]).output();
        let output = output.with_context(|| format!("{} cannot be started", self.path.display()))?;
        if !output.status.success() {
            bail!("{} does not list its tests", self.path.display());
        }
        let names = String::from_utf8_lossy(&output.stdout);
        Ok(names.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
    }

    /// Returns the command that runs these of its tests, one after the other, as root if they need
    /// it.
    ///
    /// # Errors
    /// The tests need root, and there is no sudo.
    pub(super) fn command(&self, tests: &[String], variables: &[(&str, PathBuf)]) -> Result<Command> {
        let mut command = if self.privileged {
            cargo::privileged(&self.path)
                .context("these tests need root: run `cargo xtask test` as root, or install sudo")?
        } else {
            Command::new(&self.path)
        };
        // Several tests run one after the other on the main thread. A single one gets a thread of
        // its own, as tests have in general.
        let threads = if tests.len() > 1 { "--test-threads=1" } else { "--test-threads=2" };
        command.args([threads, "--exact"]).args(tests).current_dir(&self.folder);
        command.env("CARGO_MANIFEST_DIR", &self.folder);
        command.env("TRAFFIC_POLICY_AGENT", build::program("traffic-policy-agent", false)?);
        command.envs(variables.iter().map(|(name, value)| (name, OsString::from(value))));
        Ok(command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(package: &str, kind: &str, target: &str, test: bool) -> String {
        format!(
            r#"{{"reason":"compiler-artifact","package_id":"path+file:///w/{package}","manifest_path":"/w/tests/Cargo.toml",
            "target":{{"kind":["{kind}"],"name":"{target}"}},"profile":{{"test":{test}}},"executable":"/w/target/{target}-1"}}"#
        )
        .replace('\n', " ")
    }

    #[test]
    fn programs_are_known_by_suite_or_package() {
        let of =
            |line: &str| Program::of_message(line).map(|found| (found.suite, found.unit, found.privileged));
        let policy = message("tests#traffic-policy-tests@0.1.0", "test", "policy", true);
        assert_eq!(of(&policy), Some(("policy".to_owned(), false, true)));
        let packets = message("packets#traffic-policy-packets@0.1.0", "test", "packets", true);
        assert_eq!(of(&packets), Some(("packets".to_owned(), false, true)));
        let caller = message("tests#traffic-policy-tests@0.1.0", "bin", "caller", true);
        assert_eq!(of(&caller), Some(("unit-tests".to_owned(), false, true)));
        let launch = message("lab#traffic-policy-lab@0.1.0", "test", "launch", true);
        assert_eq!(of(&launch), Some(("launch".to_owned(), true, true)));
        let agent = message("agent#traffic-policy-agent@0.1.0", "lib", "traffic_policy_agent", true);
        assert_eq!(of(&agent), Some(("unit-agent".to_owned(), true, false)));
        // The package is named like its folder.
        assert_eq!(
            of(&message("tests#0.1.0", "bin", "tests", true)),
            Some(("unit-tests".to_owned(), true, false))
        );
        assert_eq!(of(&message("xtask#0.1.0", "bin", "xtask", false)), None, "an ordinary program");
    }
}
