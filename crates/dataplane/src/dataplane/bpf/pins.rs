//! The folder in bpffs where state outlives the agent: `<bpffs>/traffic-policy/v<ABI>/`, or
//! `--pin-dir`.
//!
//! | folder | pins |
//! |---|---|
//! | `maps` | every map, by its name in the packet path |
//! | `links` | programs on devices (`xdp-2-eth0`: hook, number and name of the device) and on the cgroup |
//! | `programs` | the entry programs `tp_xdp_ingress`, `tp_tc_ingress` and `tp_tc_egress`, for others to run: in a bench of their own, with BPF_PROG_TEST_RUN or by a tail call; on the agent's maps. Where the agent was started with `--attach tc`, what `tp_xdp_ingress` jumps to is not loaded: it passes such packets on, unfinished. They are replaced when an agent starts, and take nothing from the network by themselves |

mod look;
mod removal;

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::ErrorKind,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use nix::{
    fcntl::{Flock, FlockArg},
    sys::statfs::{BPF_FS_MAGIC, statfs},
};
use traffic_policy_ebpf::abi::ABI_VERSION;

use self::removal::{remove_all, remove_version};
pub use self::{
    look::{Look, sees_all_locks},
    removal::{Removed, cleanup, remove_link},
};

/// The default of `--pin-dir`.
pub const DEFAULT: &str = "/sys/fs/bpf/traffic-policy";

/// The folder of pins, locked by this process alone.
#[derive(Debug)]
pub struct Pins {
    root: PathBuf,
    dir: PathBuf,
    /// The links and maps of an earlier agent; `None` if nothing of this version was pinned.
    before: Option<[BTreeSet<PathBuf>; 2]>,
    /// The folders of other layout versions, which this one replaces.
    others: Vec<PathBuf>,
    _lock: Flock<File>,
}

/// The value of `--on-other-layout`: the treatment of programs and maps of another layout version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum OnOtherLayout {
    /// Former programs serve until this version's maps are filled, then its programs take their
    /// places, and their flows end.
    #[default]
    Replace,
    /// Former programs and maps stay, and the agent does not start.
    Refuse,
}

impl Pins {
    /// Opens the folder of this layout version below `root`, and ensures that no other agent uses
    /// it.
    ///
    /// # Errors
    /// `root` is not on a bpffs, holds pins of another layout version that are not to be replaced,
    /// or is used by a running agent.
    pub fn open(root: &Path, on_other: OnOtherLayout) -> Result<Self> {
        if !on_bpffs(root)? {
            bail!("{}", not_bpffs(root));
        }
        fs::create_dir_all(root).with_context(|| format!("{} cannot be made", root.display()))?;
        keep_others_out(root)?;
        let file = File::open(root).with_context(|| format!("{} cannot be opened", root.display()))?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, error)| {
            anyhow::anyhow!("another traffic-policy-agent is using {} ({error}): stop it, or give this one another --pin-dir", root.display())
        })?;
        let own = format!("v{ABI_VERSION}");
        let others: Vec<String> = versions(root)?.into_iter().filter(|name| *name != own).collect();
        if let (Some(name), OnOtherLayout::Refuse) = (others.first(), on_other) {
            bail!(
                "{} holds pins of layout {name}, this agent has {own}: start it with --on-other-layout replace, which ends the flows of the other version, or run `traffic-policy-agent cleanup --pin-dir {}`, or use another --pin-dir",
                root.display(),
                root.display()
            );
        }
        let others = others.iter().map(|name| root.join(name)).collect();
        let dir = root.join(own);
        let pinned = |folder| list(&dir.join(folder)).map(|pins| pins.into_iter().collect());
        let before = if dir.exists() { Some([pinned(LINKS)?, pinned(MAPS)?]) } else { None };
        for folder in [&dir, &dir.join(LINKS), &dir.join(MAPS), &dir.join(PROGRAMS)] {
            fs::create_dir_all(folder).with_context(|| format!("{} cannot be made", folder.display()))?;
        }
        Ok(Self { root: root.to_owned(), dir, before, others, _lock: lock })
    }

    /// Removes the pins made since [`Self::open`], after a failed start: links first, then maps
    /// that no earlier agent had left. If an earlier agent has left pins, the pins of programs stay
    /// as they are.
    pub fn undo(&self) -> Result<()> {
        let Some([links, maps]) = &self.before else {
            return if self.others.is_empty() { remove_all(&self.root) } else { remove_version(&self.dir) };
        };
        for link in list(&self.links())? {
            if !links.contains(&link) {
                remove_link(&link)?;
            }
        }
        for map in list(&self.maps())? {
            if !maps.contains(&map) {
                fs::remove_file(&map).with_context(|| format!("{} cannot be removed", map.display()))?;
            }
        }
        Ok(())
    }

    /// Returns the folders of other layout versions, which this one replaces.
    pub fn others(&self) -> &[PathBuf] {
        &self.others
    }

    /// Takes over the links of other layout versions: their programs continue to run until others
    /// replace them on the links.
    ///
    /// # Errors
    /// A pin cannot be moved. Some may have been moved by then.
    pub fn adopt(&self) -> Result<()> {
        for other in &self.others {
            for link in list(&other.join(LINKS))? {
                let name = link.file_name().unwrap_or_default();
                fs::rename(&link, self.links().join(name))
                    .with_context(|| format!("{} cannot be moved", link.display()))?;
            }
        }
        Ok(())
    }

    /// Removes programs and maps of other layout versions.
    ///
    /// # Errors
    /// A folder cannot be removed: it is still one of [`Self::others`].
    pub fn drop_others(&mut self) -> Result<()> {
        while let Some(other) = self.others.last() {
            remove_version(other)?;
            self.others.pop();
        }
        Ok(())
    }

    /// Returns the folder of all layout versions.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Whether nothing of this version was pinned before.
    pub fn is_new(&self) -> bool {
        self.before.is_none()
    }

    pub fn maps(&self) -> PathBuf {
        self.dir.join(MAPS)
    }

    pub fn links(&self) -> PathBuf {
        self.dir.join(LINKS)
    }

    pub fn programs(&self) -> PathBuf {
        self.dir.join(PROGRAMS)
    }
}

const MAPS: &str = "maps";
const LINKS: &str = "links";
const PROGRAMS: &str = "programs";

/// Returns the folder of the pinned links of this layout version.
pub fn links_below(root: &Path) -> PathBuf {
    root.join(format!("v{ABI_VERSION}")).join(LINKS)
}

/// Restricts a folder of pins to this user: a user who can open it can lock it and keep every later
/// agent from starting, and its owner can put other maps and programs there. The root of a file
/// system is left as it is, because others may use it, too.
fn keep_others_out(root: &Path) -> Result<()> {
    let facts =
        |path: &Path| fs::metadata(path).with_context(|| format!("{} cannot be read", path.display()));
    let found = facts(root)?;
    let (own, owner) = (nix::unistd::geteuid().as_raw(), found.uid());
    if owner != own {
        bail!(
            "{} belongs to user {owner}, not to user {own}, as whom this agent runs: who made it can change what is pinned there. Remove it, or give another --pin-dir",
            root.display()
        );
    }
    let mode = found.mode() & 0o7777;
    if mode & 0o077 == 0 {
        return Ok(());
    }
    let top = match root.canonicalize().ok().as_deref().and_then(Path::parent) {
        Some(parent) => facts(parent)?.dev() != found.dev(),
        None => true,
    };
    if top {
        tracing::warn!(
            "{} is open to other users (mode {mode:o}), who can lock it and so keep the next agent from starting: name a folder below it with --pin-dir",
            root.display()
        );
        return Ok(());
    }
    fs::set_permissions(root, fs::Permissions::from_mode(0o700))
        .with_context(|| format!("{} cannot be closed to other users", root.display()))
}

/// Whether a folder lies on a bpffs, or would do so if it were created.
fn on_bpffs(folder: &Path) -> Result<bool> {
    let absolute = std::path::absolute(folder).with_context(|| not_bpffs(folder))?;
    let existing = absolute.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(Path::new("/"));
    let kind = statfs(existing).with_context(|| format!("{} cannot be read", existing.display()))?;
    Ok(kind.filesystem_type() == BPF_FS_MAGIC)
}

/// Returns the folder of the pinned entry programs of this layout version.
pub fn programs_below(root: &Path) -> PathBuf {
    root.join(format!("v{ABI_VERSION}")).join(PROGRAMS)
}

/// Returns the folder of the pinned maps of this layout version.
pub fn maps_below(root: &Path) -> PathBuf {
    root.join(format!("v{ABI_VERSION}")).join(MAPS)
}

/// Returns the folder of the pinned maps within the folder of a layout version.
pub fn maps_of(version: &Path) -> PathBuf {
    version.join(MAPS)
}

/// Returns the names of the layout versions that are pinned below `root`.
pub fn versions(root: &Path) -> Result<Vec<String>> {
    let names =
        list(root)?.into_iter().filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    Ok(names.filter(|name| is_version(name)).collect())
}

/// Returns the folders of the pinned maps of each layout version below `root`.
pub fn maps_of_versions(root: &Path) -> Result<Vec<PathBuf>> {
    Ok(versions(root)?.iter().map(|version| root.join(version).join(MAPS)).collect())
}

/// Whether a name is that of a folder of pins: `v` and a number.
fn is_version(name: &str) -> bool {
    name.strip_prefix('v').is_some_and(|number| number.parse::<u32>().is_ok())
}

fn list(folder: &Path) -> Result<Vec<PathBuf>> {
    match fs::read_dir(folder) {
        Ok(entries) => entries.map(|entry| Ok(entry?.path())).collect(),
        Err(error) if error.kind() == ErrorKind::NotFound || error.kind() == ErrorKind::NotADirectory => {
            Ok(Vec::new())
        }
        Err(error) => Err(error).with_context(|| format!("{} cannot be read", folder.display())),
    }
}

fn not_bpffs(root: &Path) -> String {
    format!(
        "{} is not on a BPF file system: mount one (`mount -t bpf bpf /sys/fs/bpf`), or name a folder on one with --pin-dir",
        root.display()
    )
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn others_are_kept_out() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("pins");
        fs::create_dir(&root).unwrap();
        fs::set_permissions(&root, fs::Permissions::from_mode(0o755)).unwrap();
        keep_others_out(&root).unwrap();
        assert_eq!(fs::metadata(&root).unwrap().mode() & 0o7777, 0o700);
        if !nix::unistd::geteuid().is_root() {
            // `println!` output is not shown for a test that succeeds.
            writeln!(std::io::stderr(), "SKIPPED others_are_kept_out: only root can give a folder away")
                .unwrap();
        } else {
            std::os::unix::fs::chown(&root, Some(65_534), None).unwrap();
            let error = keep_others_out(&root).unwrap_err().to_string();
            assert!(error.contains("belongs to user 65534") && error.contains("--pin-dir"), "{error}");
        }
    }

    #[test]
    fn another_version_is_forgotten_once_it_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let others = [root.join("v1"), root.join("v2")];
        fs::create_dir(&others[0]).unwrap();
        // A file cannot be removed the way a folder can.
        fs::write(&others[1], "").unwrap();
        let lock = Flock::lock(File::open(root).unwrap(), FlockArg::LockExclusiveNonblock).unwrap();
        let (dir, before) = (root.join("v3"), None);
        let mut pins = Pins { root: root.to_owned(), dir, before, others: others.to_vec(), _lock: lock };
        pins.drop_others().unwrap_err();
        assert_eq!(pins.others(), others);
        fs::remove_file(&others[1]).unwrap();
        pins.drop_others().unwrap();
        assert_eq!(pins.others(), [""; 0].map(PathBuf::from));
        assert!(!others[0].exists());
    }
}
