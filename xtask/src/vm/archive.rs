//! Debian's archive, accessed by apt with a state of its own: the machine's sources and lists stay
//! as they are.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result, bail, ensure};

use super::arch::Arch;
use crate::{cargo, files};

/// The variable that sets the archive on machines whose own apt has other sources.
pub(super) const VARIABLE: &str = "TRAFFIC_POLICY_DEBIAN_ARCHIVE";

/// The releases: the first has Linux 6.1, the last the newest.
const SUITES: [&str; 4] = ["bookworm", "trixie", "trixie-backports", "sid"];
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// The age from which lists are refreshed: packages leave the archive some time after newer ones
/// arrive.
const FRESH: Duration = Duration::from_secs(3 * 24 * 3600);

/// The lists of Debian's packages for one architecture.
pub(crate) struct Archive {
    folder: PathBuf,
    arch: Arch,
}

impl Archive {
    /// Reads the lists, refreshing them if they are old. Old ones suffice if the archive cannot be
    /// reached.
    ///
    /// # Errors
    /// No archive is known, or it cannot be reached and there are no lists.
    pub(crate) fn open(folder: &Path, arch: Arch) -> Result<Self> {
        let archive = Self { folder: folder.join(format!("apt-{arch}")), arch };
        let lists = archive.folder.join("lists");
        let age = fs::metadata(archive.stamp()).and_then(|found| found.modified()).ok();
        let age = age.and_then(|time| SystemTime::now().duration_since(time).ok());
        if age.is_none_or(|age| age > FRESH) {
            match archive.refresh(&lists) {
                Err(error) if age.is_some() => println!("vm: using older lists of packages: {error:#}"),
                done => done?,
            }
        }
        Ok(archive)
    }

    fn stamp(&self) -> PathBuf {
        self.folder.join("refreshed")
    }

    fn refresh(&self, lists: &Path) -> Result<()> {
        println!("vm: reading the lists of Debian's packages for {} (about 20 s) …", self.arch);
        for folder in [lists.join("partial"), self.folder.join("cache/archives/partial")] {
            files::make_folder(&folder)?;
        }
        let site = site()?;
        let arch = self.arch.debian();
        let lines =
            SUITES.map(|suite| format!("deb [arch={arch} signed-by={KEYRING}] {site} {suite} main\n"));
        fs::write(self.folder.join("sources.list"), lines.concat())?;
        cargo::quietly(self.apt("apt-get").arg("update"))?;
        fs::write(self.stamp(), "")?;
        Ok(())
    }

    /// Returns a command for a program of apt with this state.
    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let folder = self.folder.display();
        let arch = self.arch.debian();
        for option in [
            format!("Dir::Etc::SourceList={folder}/sources.list"),
            "Dir::Etc::SourceParts=/dev/null".to_owned(),
            "Dir::Etc::Preferences=/dev/null".to_owned(),
            "Dir::Etc::PreferencesParts=/dev/null".to_owned(),
            format!("Dir::State::Lists={folder}/lists"),
            "Dir::State::Status=/dev/null".to_owned(),
            format!("Dir::Cache={folder}/cache"),
            format!("APT::Architecture={arch}"),
            format!("APT::Architectures::={arch}"),
            "APT::Install-Recommends=false".to_owned(),
            "APT::Sandbox::User=root".to_owned(),
            "Acquire::Languages=none".to_owned(),
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".to_owned(),
            "Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false".to_owned(),
        ] {
            command.args(["-o", &option]);
        }
        command.args(["-q"]);
        command
    }

    /// Returns the names of all packages with this prefix.
    pub(super) fn names(&self, beginning: &str) -> Result<Vec<String>> {
        let output = self.apt("apt-cache").args(["pkgnames", beginning]).output();
        let output = output.context("apt-cache cannot be started")?;
        Ok(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect())
    }

    /// Returns the dependencies of packages, by their names. There is one call for all, because apt
    /// reads its lists each time, for seconds.
    pub(super) fn depends(&self, packages: &[String]) -> Result<BTreeMap<String, Depends>> {
        let output = self.apt("apt-cache").args(["depends", "--important"]).args(packages).output();
        let output = output.context("apt-cache cannot be started")?;
        Ok(depends(&String::from_utf8_lossy(&output.stdout)))
    }

    /// Unpacks packages into a folder, without running their installation scripts.
    pub(crate) fn unpack(&self, packages: &[String], to: &Path) -> Result<()> {
        let cache = self.folder.join("packages");
        files::remove(&cache)?;
        files::make_folder(&cache)?;
        let mut download = self.apt("apt-get");
        download.arg("download").args(packages).current_dir(&cache);
        if cargo::quietly(&mut download).is_err() {
            // A newer version has replaced it since the lists were read.
            self.refresh(&self.folder.join("lists"))?;
            cargo::quietly(&mut download)?;
        }
        extract(&cache, to)
    }

    /// Unpacks packages and all of their dependencies.
    pub(super) fn unpack_closure(&self, packages: &[&str], to: &Path) -> Result<()> {
        cargo::quietly(self.apt("apt-get").args(["install", "--yes", "--download-only"]).args(packages))?;
        extract(&self.folder.join("cache/archives"), to)
    }
}

/// Extracts the packages of a folder, and removes them from it.
fn extract(from: &Path, to: &Path) -> Result<()> {
    files::make_folder(to)?;
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            cargo::quietly(Command::new("dpkg-deb").arg("--extract").arg(&path).arg(to))?;
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// The names of packages that another one depends on.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Depends {
    pub(super) there: Vec<String>,
    /// Names of packages that are virtual, or no longer in the archive.
    pub(super) without_package: Vec<String>,
}

/// Parses the output of `apt-cache depends`: a package's own name, then its dependencies, indented;
/// names without a package are in angle brackets.
fn depends(text: &str) -> BTreeMap<String, Depends> {
    let mut packages: BTreeMap<String, Depends> = BTreeMap::new();
    let mut current = None;
    for line in text.lines() {
        if !line.starts_with(' ') {
            current = Some(line.to_owned());
        }
        let name = line.trim().strip_prefix("Depends: ");
        let (Some(current), Some(name)) = (&current, name) else { continue };
        let depends = packages.entry(current.clone()).or_default();
        match name.strip_prefix('<') {
            Some(name) => depends.without_package.push(name.trim_end_matches('>').to_owned()),
            None => depends.there.push(name.to_owned()),
        }
    }
    packages
}

/// Returns the address of Debian's archive, from this machine's apt or from the environment.
fn site() -> Result<String> {
    if let Ok(site) = env::var(VARIABLE) {
        return Ok(site);
    }
    ensure!(
        Path::new(KEYRING).exists(),
        "the keys of Debian's archive are missing: install debian-archive-keyring"
    );
    let format = "$(ORIGIN) $(CODENAME) $(SITE)";
    let known = cargo::output(Command::new("apt-get").args(["indextargets", "--format", format]));
    let known = known.unwrap_or_default();
    match debian_site(&known) {
        Some(site) => Ok(site),
        None => bail!(
            "this machine's apt knows no Debian archive, which has the kernels and musl: set {VARIABLE} to the address of one (as in a line of sources.list)"
        ),
    }
}

/// Returns, from lines of `Origin codename site`, a site that has releases and not only their
/// security updates.
fn debian_site(lines: &str) -> Option<String> {
    let of_debian = lines.lines().filter_map(|line| line.strip_prefix("Debian "));
    let mut sites = of_debian.filter_map(|line| line.split_once(' '));
    sites.find(|(codename, _)| !codename.ends_with("-security")).map(|(_, site)| site.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_package_needs_may_be_gone() {
        let text = "linux-image-6.19\n  PreDepends: linux-base\n |Depends: dracut\n  Depends: <linux-modules-6.19>\nlinux-image-7.3\n  Depends: kmod\n";
        let found = depends(text);
        assert_eq!(found.len(), 2);
        assert_eq!(found["linux-image-6.19"].without_package, ["linux-modules-6.19"]);
        assert_eq!(
            (&*found["linux-image-7.3"].there, found["linux-image-7.3"].without_package.len()),
            (&["kmod".to_owned()][..], 0)
        );
    }

    #[test]
    fn the_site_with_releases() {
        let lines = "Debian bookworm-security http://a/debian-security\nUbuntu noble http://b/ubuntu\nDebian bookworm http://c/debian\n";
        assert_eq!(debian_site(lines).as_deref(), Some("http://c/debian"));
        assert_eq!(debian_site("Ubuntu noble http://b/ubuntu\n"), None);
    }
}
