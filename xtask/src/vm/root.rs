//! The root disk of emulated machines: programs of the running system with their libraries (or
//! Debian's packages, for another architecture), the agent, the test programs and their data, each
//! at its path on the host.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use super::{arch::Arch, archive::Archive, disk};
use crate::{cargo, files};

/// Programs of which tests and people need the real ones; all others are busybox's.
const PROGRAMS: [&str; 15] = [
    "bash",
    "bridge",
    "ethtool",
    "ip",
    "ip6tables-restore",
    "iptables-restore",
    "modprobe",
    "mount",
    "nft",
    "nsenter",
    "openssl",
    "setsid",
    "tc",
    "umount",
    "unshare",
];
/// The programs without which no job runs; others are left out if the host does not have them.
const ESSENTIAL: [&str; 4] = ["bash", "ip", "modprobe", "mount"];
/// The Debian packages that contain these programs.
const PACKAGES: [&str; 11] = [
    "bash",
    "dash",
    "ethtool",
    "iproute2",
    "iptables",
    "kmod",
    "libgcc-s1",
    "mount",
    "nftables",
    "openssl",
    "util-linux",
];
/// Additional packages if the first process is systemd: systemd itself, the `kill` of units, and
/// the library with which it filters system calls.
const SYSTEMD: [&str; 3] = ["libseccomp2", "procps", "systemd"];
/// The free space on the disk, in mebibytes.
const FREE: u64 = 256;

/// A root disk.
#[derive(Clone, Debug)]
pub(super) struct Root {
    pub(super) image: PathBuf,
}

/// The files on the disk in addition to the system.
#[derive(Clone, Debug, Default)]
pub(super) struct Content {
    /// The programs that were built, by their paths.
    pub(super) programs: Vec<PathBuf>,
    /// The folders with data, by their paths.
    pub(super) data: Vec<PathBuf>,
    /// Whether the job starts systemd; the system then consists of Debian's packages.
    pub(super) systemd: bool,
}

impl Root {
    /// Makes the disk. Only the system's part is kept between runs.
    pub(super) fn make(folder: &Path, archive: &Archive, arch: Arch, content: &Content) -> Result<Self> {
        let name = if content.systemd { format!("root-{arch}-systemd") } else { format!("root-{arch}") };
        let base = folder.join(&name);
        let system = if content.systemd {
            debian(&base, archive, &[&PACKAGES[..], &SYSTEMD].concat())
        } else if Arch::of_host() == Some(arch) {
            files::remove(&base)?;
            running_system(&base, &content.programs)
        } else {
            debian(&base, archive, &PACKAGES)
        };
        system.context("the root disk's system cannot be put together")?;
        for program in &content.programs {
            let to = inside(&base, program);
            copy_stripped(program, &to, arch)
                .with_context(|| format!("{} cannot be copied", program.display()))?;
        }
        for data in &content.data {
            files::copy_folder(data, &inside(&base, data))?;
        }
        let image = folder.join(format!("{name}.ext4"));
        disk::make(&base, &image, FREE)?;
        Ok(Self { image })
    }
}

fn inside(base: &Path, path: &Path) -> PathBuf {
    base.join(path.strip_prefix("/").unwrap_or(path))
}

/// Makes the folders that everything else is put into, and the first process.
fn skeleton(base: &Path) -> Result<()> {
    for name in ["dev", "etc", "lib/modules", "proc", "root", "run", "sbin", "sys", "tmp", "usr/bin", "var"] {
        fs::create_dir_all(base.join(name))?;
    }
    fs::write(
        base.join("etc/passwd"),
        "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534::/:/bin/false\n",
    )?;
    fs::write(base.join("etc/group"), "root:x:0:\nnogroup:x:65534:\n")?;
    fs::write(base.join("etc/hosts"), "127.0.0.1 localhost\n::1 localhost\n")?;
    disk::script(&base.join("sbin/first"), include_str!("guest/first.sh"))
}

/// Copies programs of the machine that runs this, and the libraries of those and of the programs
/// that were built.
fn running_system(base: &Path, built: &[PathBuf]) -> Result<()> {
    skeleton(base)?;
    let mut libraries: BTreeSet<PathBuf> = built.iter().flat_map(|path| loaded_libraries(path)).collect();
    for name in PROGRAMS {
        let folders = ["/usr/sbin", "/sbin"].map(|folder| Path::new(folder).join(name));
        let found = cargo::find(name).or_else(|| folders.into_iter().find(|path| path.exists()));
        let Some(path) = found else {
            if ESSENTIAL.contains(&name) {
                bail!("there is no program {name} on this machine");
            }
            continue;
        };
        let real = fs::canonicalize(&path)?;
        libraries.extend(loaded_libraries(&real));
        files::copy(&real, &base.join("usr/bin").join(name))?;
    }
    symlink("usr/bin", base.join("bin"))?;
    symlink("bin", base.join("usr/sbin"))?;
    // The kernel expects modprobe at this path.
    symlink("../usr/bin/modprobe", base.join("sbin/modprobe"))?;
    for library in libraries {
        files::copy(&library, &inside(base, &library))?;
    }
    let extensions = extensions();
    let files = ["etc/ssl/openssl.cnf", "etc/iproute2", "usr/share/iproute2"].into_iter();
    for name in files.chain(extensions.as_deref()) {
        let from = Path::new("/").join(name);
        if from.is_dir() {
            files::copy_folder(&from, &base.join(name))?;
        } else if from.exists() {
            files::copy(&from, &base.join(name))?;
        }
    }
    Ok(())
}

/// Returns the folder of the libraries that iptables loads for each match and target.
fn extensions() -> Option<String> {
    let folder = format!("usr/lib/{}-linux-gnu/xtables", std::env::consts::ARCH);
    Path::new("/").join(&folder).is_dir().then_some(folder)
}

/// Returns the paths of the shared libraries of a program, as the dynamic linker finds them.
fn loaded_libraries(program: &Path) -> Vec<PathBuf> {
    let listed = cargo::output(Command::new("ldd").arg(program)).unwrap_or_default();
    listed.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect()
}

/// Unpacks Debian's packages.
fn debian(base: &Path, archive: &Archive, packages: &[&str]) -> Result<()> {
    // The list is written last, so that an incomplete system is not used.
    let (list, wanted) = (base.join("etc/packages"), packages.join("\n"));
    if fs::read_to_string(&list).is_ok_and(|unpacked| unpacked == wanted) {
        return skeleton(base);
    }
    println!("vm: fetching a root file system (some 60 MB) …");
    fs::create_dir_all(base.join("usr"))?;
    for name in ["bin", "sbin", "lib", "lib64"] {
        fs::create_dir_all(base.join("usr").join(name))?;
        if !base.join(name).exists() {
            symlink(format!("usr/{name}"), base.join(name))?;
        }
    }
    archive.unpack_closure(packages, base)?;
    // The packages' scripts would make the same choice.
    for name in ["iptables-restore", "ip6tables-restore"] {
        let link = base.join("usr/sbin").join(name);
        if !link.exists() {
            symlink("xtables-nft-multi", link)?;
        }
    }
    if !base.join("usr/bin/sh").exists() {
        symlink("dash", base.join("usr/bin/sh"))?;
    }
    skeleton(base)?;
    Ok(fs::write(list, wanted)?)
}

/// Copies a program without debug information, which is nine tenths of a test program.
fn copy_stripped(from: &Path, to: &Path, arch: Arch) -> Result<()> {
    let newer = |a: &Path, b: &Path| {
        Some(fs::metadata(a).ok()?.modified().ok()? > fs::metadata(b).ok()?.modified().ok()?)
    };
    if newer(to, from) == Some(true) {
        return Ok(());
    }
    if let Some(folder) = to.parent() {
        files::make_folder(folder)?;
    }
    let own = Arch::of_host() == Some(arch);
    let prefix = if own { String::new() } else { format!("{arch}-linux-gnu-") };
    let strip = Command::new(format!("{prefix}strip")).arg("-o").arg(to).arg(from).status();
    match strip {
        Ok(status) if status.success() => Ok(()),
        // An unstripped program is large, but works as well.
        _ => files::copy(from, to),
    }
}
