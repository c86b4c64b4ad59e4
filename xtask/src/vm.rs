//! `cargo xtask vm`: machines with Debian's kernels, emulated where there is no KVM, for tests, for
//! manual experiments, and as nodes.

pub(crate) mod arch;
pub(crate) mod archive;

mod count;
mod cpio;
mod disk;
mod job;
mod kernel;
mod lab;
mod ladder;
mod machine;
mod records;
mod root;

mod series;
mod shell;
mod wires;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, Subcommand};

pub(crate) use self::ladder::Smoke;
use self::{
    arch::Arch,
    archive::Archive,
    kernel::Kernel,
    root::{Content, Root},
    series::Wanted,
};
use crate::{build, cargo, setup, target};

#[derive(Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Run test suites on a ladder of kernels
    Test(ladder::Options),
    /// Open a machine to try things by hand
    Shell(shell::Options),
    /// Count the instructions of one packet: the same on each run and each host
    Count(count::Options),
    /// Run three machines as nodes, connected by their network cards, and a client outside
    Lab(lab::Options),
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    setup::ensure()?;
    match &options.verb {
        Verb::Test(options) => ladder::run(options),
        Verb::Shell(options) => shell::run(options),
        Verb::Count(options) => count::run(options),
        Verb::Lab(options) => lab::run(options),
    }
}

/// `--kernel` and `--arch`, which all commands have.
#[derive(Args)]
struct Choice {
    /// Kernels of Debian's archive, separated by commas: 6.1, 7.x (the newest 7), oldest, newest,
    /// or all
    #[arg(long = "kernel", value_name = "K", value_delimiter = ',')]
    kernels: Vec<Wanted>,
    /// Architecture of the machine; one that differs from this machine's is emulated, and its
    /// programs are cross-compiled
    #[arg(long, value_name = "ARCH")]
    arch: Option<Arch>,
}

impl Choice {
    fn arch(&self) -> Result<Arch> {
        let arch = self.arch.or_else(Arch::of_host);
        arch.context("this machine's architecture has no emulated twin: name one with --arch")
    }

    /// Returns the workshop with the selected kernels, or with those of `otherwise`.
    fn workshop(&self, otherwise: &[Wanted]) -> Result<Workshop> {
        let wanted = if self.kernels.is_empty() { otherwise } else { &self.kernels };
        Workshop::open(self.arch()?, wanted)
    }
}

/// The inputs of machines: kernels from the archive, and a root disk.
struct Workshop {
    arch: Arch,
    folder: PathBuf,
    archive: Archive,
    kernels: Vec<Kernel>,
}

impl Workshop {
    /// Installs the programs that are needed, and fetches the kernels.
    fn open(arch: Arch, wanted: &[Wanted]) -> Result<Self> {
        let programs = [
            (arch.qemu(), arch.qemu_package()),
            ("mke2fs", "e2fsprogs"),
            ("depmod", "kmod"),
            ("cpio", "cpio"),
            ("xz", "xz-utils"),
            ("strip", "binutils"),
            ("ip", "iproute2"),
            // These are needed for the root disk of machines of this architecture.
            ("ethtool", "ethtool"),
            ("nft", "nftables"),
            ("iptables-restore", "iptables"),
        ];
        let missing = setup::programs::prepare(&programs, "no machine can be emulated");
        if !missing.is_empty() {
            bail!("no machine can be emulated without {}", missing.join(", "));
        }
        for program in ["apt-get", "dpkg-deb"] {
            cargo::find(program).with_context(|| {
                format!("kernels come as Debian's packages, and there is no {program} on this machine")
            })?;
        }
        let folder = build::target_folder()?.join("vm");
        let archive = Archive::open(&folder, arch)?;
        let mut releases = series::releases(&archive.names("linux-image-")?, arch);
        // The archive keeps the signed image of a kernel for some time after its other parts.
        let packages: Vec<_> = releases.values().map(|release| release.package.clone()).collect();
        let depends = archive.depends(&packages)?;
        releases.retain(|series, release| {
            let lost = depends.get(&release.package).map_or(&[][..], |depends| &depends.without_package);
            let lost = lost.iter().find(|name| kernel::is_part(name));
            if let Some(part) = lost {
                println!("vm: Linux {series} is left out: the archive has no longer its package {part}");
            }
            lost.is_none()
        });
        let chosen = series::choose(wanted, &releases).map_err(|error| anyhow!(error))?;
        let fetch = |release| Kernel::fetch(&folder, &archive, arch, release);
        let kernels = chosen.iter().map(fetch).collect::<Result<_>>()?;
        Ok(Self { arch, folder, archive, kernels })
    }

    /// Makes the root disk with the agent, the files that tests use, and these programs.
    fn root(&self, built: &Built, programs: impl IntoIterator<Item = PathBuf>) -> Result<Root> {
        println!("vm: making the root disk …");
        let mut programs: Vec<PathBuf> = programs.into_iter().collect();
        programs.extend(PROGRAMS.map(|name| built.program(name)));
        programs.sort();
        programs.dedup();
        // The page contains a table with which the suite cni compares.
        let data = ["tests/testdata", "crates/packets/testdata", "docs"];
        let data = data.map(|folder| cargo::root().join(folder)).to_vec();
        let systemd = built.suites.iter().any(|(name, path)| name == job::SYSTEMD && programs.contains(path));
        Root::make(&self.folder, &self.archive, self.arch, &Content { programs, data, systemd })
    }

    /// Makes the root disk with everything that was built for the machines' architecture.
    fn root_with_all(&self) -> Result<(Root, Built)> {
        let built = Built::all(self.arch)?;
        let suites = built.suites.iter().map(|(_, path)| path.clone());
        let root = self.root(&built, suites.chain([built.program("bench")]))?;
        Ok((root, built))
    }
}

/// The agent.
const AGENT: &str = "traffic-policy-agent";
/// The programs that each root disk has: the agent, the plugin of kubectl, which tests expect in
/// the agent's folder, the program that tests of sockets start, the demo and the lab.
const PROGRAMS: [&str; 5] = [AGENT, "kubectl-traffic_policy", "caller", "demo", "lab"];

/// The programs of this workspace for one architecture.
struct Built {
    arch: Arch,
    /// The folder of the programs that are no tests.
    folder: PathBuf,
    /// The test programs by their names.
    suites: Vec<(String, PathBuf)>,
}

impl Built {
    fn all(arch: Arch) -> Result<Self> {
        let target = if Arch::of_host() == Some(arch) { None } else { Some(target::named(arch.target())?) };
        setup::ensure_for(target)?;
        println!("vm: building the agent and the tests …");
        let suites = build::test_programs(target)?;
        Ok(Self { arch, folder: build::folder(target, false)?, suites })
    }

    /// Returns the path of a program that is no test.
    fn program(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Returns the folder in which tests are started. With cargo it is that of their package, which
    /// for most of them is this one; the others name files by their whole paths.
    fn working_folder() -> &'static Path {
        static FOLDER: std::sync::LazyLock<PathBuf> =
            std::sync::LazyLock::new(|| cargo::root().join("tests"));
        &FOLDER
    }
}
