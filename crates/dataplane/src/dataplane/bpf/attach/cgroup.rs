//! Programs on a cgroup, for connections of its processes: attached by pinned links, taken over,
//! and replaced without a gap.

use std::{
    collections::BTreeSet,
    convert::Infallible,
    ffi::OsString,
    fs::{self, File},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::{ffi::OsStringExt, fs::MetadataExt},
    },
    path::{Path, PathBuf},
    str::FromStr,
};

use anyhow::{Context, Result, bail};
use aya::{
    Ebpf,
    programs::{CgroupAttachMode, Program, links::FdLink},
};
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};

use super::super::pins::remove_link;
use crate::dataplane::sys;

/// The value of `--cgroup`: the processes whose connections to Services are translated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Cgroup {
    /// All processes in the mounted cgroup2 hierarchy.
    #[default]
    Mounted,
    /// The processes in this folder of the hierarchy and below it.
    Folder(PathBuf),
    /// No processes.
    None,
}

/// The attach types of the programs, as in the names of their pins, and the names of the programs.
const CALLS: [(&str, &str); 10] = [
    ("connect4", "tp_connect4"),
    ("connect6", "tp_connect6"),
    ("sendmsg4", "tp_sendmsg4"),
    ("sendmsg6", "tp_sendmsg6"),
    ("recvmsg4", "tp_recvmsg4"),
    ("recvmsg6", "tp_recvmsg6"),
    ("getpeername4", "tp_getpeer4"),
    ("getpeername6", "tp_getpeer6"),
    ("release", "tp_sk_release"),
    ("sock_ops", "tp_sock_ops"),
];

/// Whether a program is one of them.
pub fn is_program(name: &str) -> bool {
    CALLS.iter().any(|(_, program)| *program == name)
}

/// The prefix of the names of the links' pins.
const LINK: &str = "cgroup";

impl Cgroup {
    /// Returns the folder to attach to.
    ///
    /// # Errors
    /// The folder is not on a cgroup2 hierarchy, or none is mounted.
    pub fn folder(&self) -> Result<Option<PathBuf>> {
        let folder = match self {
            Self::None => return Ok(None),
            Self::Folder(folder) => folder.clone(),
            Self::Mounted => {
                Self::mounted()?.context("no cgroup2 is mounted: mount one (`mount -t cgroup2 none /sys/fs/cgroup`), or say --cgroup none to leave connections made on this node alone")?
            }
        };
        let kind =
            statfs(&folder).with_context(|| format!("--cgroup: {} cannot be read", folder.display()))?;
        if kind.filesystem_type() != CGROUP2_SUPER_MAGIC {
            bail!(
                "--cgroup: {} is no cgroup2 folder: name the mount point of type cgroup2 that /proc/self/mountinfo shows, or a folder below it, or say --cgroup none",
                folder.display()
            );
        }
        Ok(Some(folder))
    }

    /// Returns the mount point of cgroup2; if there are several, the one with the topmost cgroup.
    pub fn mounted() -> Result<Option<PathBuf>> {
        let mounts =
            fs::read_to_string("/proc/self/mountinfo").context("reading /proc/self/mountinfo failed")?;
        Ok(top(&mounts))
    }
}

impl FromStr for Cgroup {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "auto" => Self::Mounted,
            "none" => Self::None,
            folder => Self::Folder(folder.into()),
        })
    }
}

/// Returns the mount point with the topmost cgroup. In a container that mounts the node's hierarchy
/// in addition to its own, this is the node's.
fn top(mountinfo: &str) -> Option<PathBuf> {
    mount_points(mountinfo)
        // Cgroups are numbered in order of creation, so the topmost one has the lowest number.
        .filter_map(|path| Some((fs::metadata(&path).ok()?.ino(), path)))
        .min()
        .map(|(_, path)| path)
}

/// Returns the mount points of type cgroup2.
fn mount_points(mountinfo: &str) -> impl Iterator<Item = PathBuf> {
    mountinfo.lines().filter_map(|line| {
        let (place, kind) = line.split_once(" - ")?;
        (kind.split(' ').next() == Some("cgroup2")).then_some(())?;
        Some(unescaped(place.split(' ').nth(4)?))
    })
}

/// Decodes a path of mountinfo, where blanks and the like are a backslash and three octal digits
/// (proc(5)).
fn unescaped(text: &str) -> PathBuf {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let code = tail.get(..3).and_then(|digits| str::from_utf8(digits).ok());
        match code.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) if *first == b'\\' => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

/// Attaches the programs to a cgroup; those of an earlier agent are replaced in one step.
pub fn attach(object: &mut Ebpf, links: &Path, folder: &Path) -> Result<()> {
    let cgroup = File::open(folder).with_context(|| format!("{} cannot be opened", folder.display()))?;
    for (call, name) in CALLS {
        let program =
            object.program_mut(name).with_context(|| format!("the packet path has no program {name}"))?;
        let path = pin(links, &cgroup, call)?;
        if path.exists() {
            match sys::update_link(&path, descriptor(program)?) {
                Ok(()) => continue,
                Err(error) => tracing::debug!(pin = %path.display(), "the pinned link is dead: {error}"),
            }
        }
        remove_link(&path)?;
        let link = put(program, &cgroup)
            .with_context(|| format!("attaching {name} to the cgroup {} failed", folder.display()))?;
        link.pin(&path).with_context(|| format!("{} cannot be pinned", path.display()))?;
    }
    Ok(())
}

/// Returns the calls whose programs are no longer on the cgroup, or have been replaced.
pub fn lost(object: &Ebpf, links: &Path, folder: &Path) -> Result<Vec<&'static str>> {
    let cgroup = File::open(folder).with_context(|| format!("{} cannot be opened", folder.display()))?;
    let mut lost = Vec::new();
    for (call, name) in CALLS {
        let program = object.program(name);
        let program = program.and_then(|program| Some(program.info().ok()?.id()));
        let held = sys::link_info(&pin(links, &cgroup, call)?).ok();
        if !held.is_some_and(|link| link.target != [0; 2] && Some(link.program) == program) {
            lost.push(call);
        }
    }
    Ok(lost)
}

fn descriptor(program: &Program) -> Result<BorrowedFd<'_>> {
    Ok(match program {
        Program::CgroupSockAddr(program) => program.fd()?.as_fd(),
        Program::CgroupSock(program) => program.fd()?.as_fd(),
        Program::SockOps(program) => program.fd()?.as_fd(),
        _ => bail!("it is no program for cgroups"),
    })
}

/// Attaches a program, in addition to others that may be there.
fn put(program: &mut Program, cgroup: &File) -> Result<FdLink> {
    // A link of the kernel always allows others to attach as well.
    let mode = CgroupAttachMode::Single;
    Ok(match program {
        Program::CgroupSockAddr(program) => {
            let id = program.attach(cgroup, mode)?;
            program.take_link(id)?.try_into()?
        }
        Program::CgroupSock(program) => {
            let id = program.attach(cgroup, mode)?;
            program.take_link(id)?.try_into()?
        }
        Program::SockOps(program) => {
            let id = program.attach(cgroup, mode)?;
            program.take_link(id)?.try_into()?
        }
        _ => bail!("it is no program for cgroups"),
    })
}

/// Returns the path of a link's pin. The cgroup's number is part of the name: a cgroup that was
/// recreated under its old name is another one.
fn pin(links: &Path, cgroup: &File, call: &str) -> Result<PathBuf> {
    let number = cgroup.metadata().context("the number of the cgroup cannot be read")?.ino();
    Ok(links.join(format!("{LINK}-{number}-{call}")))
}

/// Whether a pin is the link of a program on a cgroup.
pub fn is_link(pin: &Path) -> bool {
    let name = pin.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.split('-').next() == Some(LINK)
}

/// Removes links to other cgroups than `present`: they are dead, or no longer wanted.
pub fn retain(links: &Path, present: Option<&Path>) -> Result<()> {
    let mut wanted = BTreeSet::new();
    if let Some(folder) = present {
        let cgroup = File::open(folder).with_context(|| format!("{} cannot be opened", folder.display()))?;
        for (call, _) in CALLS {
            wanted.insert(pin(links, &cgroup, call)?);
        }
    }
    for entry in fs::read_dir(links).with_context(|| format!("{} cannot be read", links.display()))? {
        let path = entry?.path();
        if is_link(&path) && !wanted.contains(&path) {
            remove_link(&path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_of_cgroup2() {
        let mountinfo = "\
25 1 0:22 / /proc rw,nosuid - proc proc rw
30 26 0:26 / /sys/fs/cgroup rw,nosuid - tmpfs tmpfs rw,mode=755
31 30 0:27 / /sys/fs/cgroup/cpu rw,nosuid shared:9 - cgroup cgroup rw,cpu
41 30 0:37 / /sys/fs/cgroup/unified rw,nosuid shared:10 master:2 - cgroup2 cgroup2 rw,nsdelegate
42 30 0:37 /../.. /host\\040of\\134all/cgroup rw - cgroup2 cgroup2 rw
";
        let found: Vec<_> = mount_points(mountinfo).collect();
        assert_eq!(found, [PathBuf::from("/sys/fs/cgroup/unified"), PathBuf::from("/host of\\all/cgroup")]);
    }

    #[test]
    fn by_name() {
        for (text, cgroup) in
            [("auto", Cgroup::Mounted), ("none", Cgroup::None), ("/x/auto", Cgroup::Folder("/x/auto".into()))]
        {
            assert_eq!(text.parse(), Ok(cgroup));
        }
    }

    #[test]
    fn other_folders_are_no_cgroups() {
        let error = Cgroup::Folder("/proc".into()).folder().unwrap_err().to_string();
        assert!(error.contains("/proc is no cgroup2 folder"), "{error}");
        let error = Cgroup::Folder("/nowhere".into()).folder().unwrap_err().to_string();
        assert!(error.contains("/nowhere cannot be read"), "{error}");
        assert_eq!(Cgroup::None.folder().unwrap(), None);
    }

    #[test]
    fn pins_of_devices_are_others() {
        assert!(is_link(Path::new("/links/cgroup-77-connect4")));
        assert!(!is_link(Path::new("/links/ingress-7-cgroup-7")));
    }
}
