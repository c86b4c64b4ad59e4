//! Manual pages: one for each command, with each flag, and read by `man` without a warning.

use std::{
    collections::BTreeSet,
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use clap::CommandFactory as _;
use traffic_policy_agent::command::Arguments;
use traffic_policy_lb::command as plugin_command;
use traffic_policy_testing::agent;

use crate::kubectl::{Installed, out};

fn write(program: &Path, folder: &Path) -> Output {
    Command::new(program).arg("man").arg(folder).output().unwrap()
}

/// Collects the required pages, each with the words that it must contain.
fn expected(name: &str, command: &clap::Command, pages: &mut Vec<(String, Vec<String>)>) {
    let inner: Vec<_> = command.get_subcommands().filter(|inner| inner.get_name() != "help").collect();
    let flags = command.get_arguments().filter(|flag| !flag.is_hide_set()).filter_map(|flag| flag.get_long());
    let flags = flags.map(|flag| format!("--{flag}"));
    let words = flags.chain(inner.iter().map(|inner| format!("{name}-{}(1)", inner.get_name()))).collect();
    pages.push((format!("{name}.1"), words));
    for inner in inner {
        expected(&format!("{name}-{}", inner.get_name()), inner, pages);
    }
}

/// The words that a page lacks, determined from the markup itself.
fn missing(text: &str, words: &[String]) -> Vec<String> {
    // Hyphens are escaped, and names are set in other fonts.
    let text = text.replace("\\-", "-").replace("\\fB", "").replace("\\fI", "").replace("\\fR", "");
    let has = |word: &str| {
        text.split(|c: char| !(c.is_alphanumeric() || "-_()".contains(c))).any(|found| found == word)
    };
    words.iter().filter(|word| !has(word)).cloned().collect()
}

/// The warnings of `man`, if it is installed.
fn warnings(page: &Path) -> Option<String> {
    let output = Command::new("man")
        .args(["--warnings", "-E", "UTF-8", "-l"])
        .arg(page)
        .env("MANPAGER", "cat")
        .output()
        .ok()?;
    assert!(output.status.success() && !output.stdout.is_empty(), "{}: {output:?}", page.display());
    Some(String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Checks the pages of a program.
fn check(program: &Path, name: &str, mut command: clap::Command) {
    let folder = tempfile::tempdir().unwrap();
    out(&write(program, folder.path()));
    command.build();
    let mut pages = Vec::new();
    expected(name, &command, &mut pages);
    let found =
        fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let names = pages.iter().map(|(page, _)| page.clone());
    assert_eq!(found.collect::<BTreeSet<_>>(), names.collect::<BTreeSet<_>>());
    let path = |page: &str| -> PathBuf { folder.path().join(page) };
    let mut is_read = true;
    for (page, words) in &pages {
        let text = fs::read_to_string(path(page)).unwrap();
        assert!(text.contains(".TH") && text.contains(".SH SYNOPSIS"), "{page}: {text}");
        assert_eq!(missing(&text, words), Vec::<String>::new(), "{page}");
        match warnings(&path(page)) {
            Some(said) => assert_eq!(said, "", "{page}"),
            None => is_read = false,
        }
    }
    if !is_read {
        writeln!(std::io::stderr(), "SKIPPED reading the manual pages of {name}: there is no man").ok();
    }
}

#[test]
fn each_command_has_a_page_with_its_flags() {
    let installed = Installed::new();
    check(&agent::program().unwrap(), "traffic-policy-agent", Arguments::command());
    check(
        &installed.folder.path().join("kubectl-traffic_policy"),
        "kubectl-traffic_policy",
        plugin_command::command(),
    );
}

#[test]
fn pages_need_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let output = write(&agent::program().unwrap(), &folder.path().join("missing"));
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("missing is no folder"), "{output:?}");
}
