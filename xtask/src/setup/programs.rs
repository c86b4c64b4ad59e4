//! Programs that only some commands need, installed on first use of such a command.

use std::path::Path;

use super::step::{self, Step};
use crate::cargo;

/// A program, and its package in Debian and Ubuntu.
pub(crate) type Program<'a> = (&'a str, &'a str);

/// The programs that write rules of nftables and iptables, and set what devices merge: the bench
/// compares with the former, and layouts of network plugins use all.
pub(crate) const RULES: [Program<'static>; 3] =
    [("nft", "nftables"), ("iptables-restore", "iptables"), ("ethtool", "ethtool")];

pub(crate) const NO_RULES: &str = "tests of network plugins' layouts are skipped";

/// The programs by which tests examine an installation: completions, manual pages, HTTP answers.
pub(crate) const READERS: [Program<'static>; 4] =
    [("zsh", "zsh"), ("fish", "fish"), ("man", "man-db"), ("curl", "curl")];

pub(crate) const NO_READERS: &str = "parts of the tests of what is installed are skipped";

/// The browser that opens the pages of `lb --html` and of the bench.
pub(crate) const BROWSER: [Program<'static>; 1] = [("chromium", "chromium")];
pub(crate) const NO_BROWSER: &str = "tests that open pages are skipped";

/// Installs what is missing, if there is apt and permission to use it. Returns the names of
/// programs that are still missing. `without` describes what is then not possible.
pub(crate) fn prepare<'a>(programs: &[Program<'a>], without: &str) -> Vec<&'a str> {
    let missing: Vec<_> = programs.iter().filter(|(name, _)| !is_there(name)).collect();
    if missing.is_empty() {
        return Vec::new();
    }
    let packages: Vec<String> = missing.iter().map(|(_, package)| (*package).to_owned()).collect();
    if cargo::find("apt-get").is_none() || !(cargo::is_root() || cargo::find("sudo").is_some()) {
        println!("setup: not installed: {}; {without}", packages.join(" "));
    } else {
        for step in [Step::AptUpdate, Step::AptInstall(packages)] {
            println!("setup: {step} …");
            if let Err(error) = step::carry_out(&step) {
                println!("setup: that failed, so {without}: {error:#}");
            }
        }
    }
    missing.into_iter().map(|(name, _)| *name).filter(|name| !is_there(name)).collect()
}

/// Whether a program exists. Not every user has the folders of administrators' programs in PATH.
fn is_there(name: &str) -> bool {
    cargo::find(name).is_some()
        || ["/usr/sbin", "/sbin"].iter().any(|folder| Path::new(folder).join(name).exists())
}
