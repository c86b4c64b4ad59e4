//! Findings about the folders that the agent is given: one on a BPF file system, one on cgroup2.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};
use traffic_policy_dataplane::{Cgroup, PinsLook};

use super::Finding;

pub(super) fn judge_pins(root: &Path, look: &PinsLook) -> Vec<Finding> {
    const PROBE: &str = "bpffs";
    let folder = root.display();
    if !look.on_bpffs {
        return vec![Finding::error(
            PROBE,
            format!("{folder} is not on a BPF file system: nothing could outlive the agent there"),
            "mount -t bpf bpf /sys/fs/bpf, or name a folder on one with --pin-dir",
        )];
    }
    if !look.other_versions.is_empty() {
        return vec![Finding::warning(
            PROBE,
            format!(
                "{folder} holds pins of another layout ({}): `run` replaces its programs, and its flows end",
                look.other_versions.join(", ")
            ),
            "run with --on-other-layout refuse if that may not be, and drain the node first",
        )];
    }
    vec![match (look.used_by, look.pinned) {
        (Some(process), _) => Finding::note(
            PROBE,
            format!("an agent uses {folder} already (process {process})"),
            "nothing: a second `run` with this --pin-dir would refuse to start",
        ),
        (None, true) => {
            Finding::ok(PROBE, format!("{folder} holds what an earlier agent left; `run` takes it over"))
        }
        (None, false) => Finding::ok(PROBE, format!("{folder} is on a BPF file system")),
    }]
}

/// Facts about the cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Facts {
    NotWanted,
    /// No cgroup was named, and cgroup2 is mounted nowhere.
    NotMounted,
    Missing(PathBuf),
    NotCgroup2(PathBuf),
    Found {
        folder: PathBuf,
        /// Whether there are cgroups above the folder.
        partial: bool,
    },
}

impl Facts {
    pub(super) fn look(cgroup: &Cgroup) -> Result<Self> {
        let folder = match cgroup {
            Cgroup::None => return Ok(Self::NotWanted),
            Cgroup::Folder(folder) => folder.clone(),
            Cgroup::Mounted => match Cgroup::mounted()? {
                Some(folder) => folder,
                None => return Ok(Self::NotMounted),
            },
        };
        if !folder.is_dir() {
            return Ok(Self::Missing(folder));
        }
        let kind = statfs(&folder).with_context(|| format!("{} cannot be read", folder.display()))?;
        if kind.filesystem_type() != CGROUP2_SUPER_MAGIC {
            return Ok(Self::NotCgroup2(folder));
        }
        // Only the root of the hierarchy has no type, even if a cgroup namespace shows another
        // cgroup as its root.
        let partial = folder.join("cgroup.type").exists();
        Ok(Self::Found { folder, partial })
    }
}

pub(super) fn judge_cgroup(facts: &Facts) -> Vec<Finding> {
    const PROBE: &str = "cgroup";
    let without = "connections that processes and pods of this node make to Services are not served";
    vec![match facts {
        Facts::NotWanted => Finding::note(
            PROBE,
            format!("--cgroup none: {without}"),
            "nothing if something else serves them, else leave --cgroup out, or serve pods at their devices by --pod-services on",
        ),
        Facts::NotMounted => Finding::error(
            PROBE,
            format!("no cgroup2 is mounted: {without}"),
            "mount -t cgroup2 none /sys/fs/cgroup/unified, or --cgroup none",
        ),
        Facts::Missing(folder) => Finding::error(
            PROBE,
            format!("there is no folder {}", folder.display()),
            "name the folder where cgroup2 is mounted with --cgroup (`findmnt -t cgroup2`), or none",
        ),
        Facts::NotCgroup2(folder) => Finding::error(
            PROBE,
            format!(
                "{} is not on cgroup2: socket programs can be attached to cgroup2 only",
                folder.display()
            ),
            "name the folder where cgroup2 is mounted with --cgroup (`findmnt -t cgroup2`), or none",
        ),
        Facts::Found { folder, partial: true } => Finding::warning(
            PROBE,
            format!(
                "{} is not the root of the cgroups: of the connections made on this node only those of processes in it are served",
                folder.display()
            ),
            "name the root with --cgroup; in a container mount the host's cgroup2 (in Kubernetes a hostPath volume)",
        ),
        Facts::Found { folder, partial: false } => {
            Finding::ok(PROBE, format!("{} is the root of cgroup2", folder.display()))
        }
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Severity;

    #[test]
    fn pins() {
        let judge = |look: PinsLook| judge_pins(Path::new("/sys/fs/bpf/x"), &look).remove(0);
        let good = PinsLook { on_bpffs: true, ..PinsLook::default() };
        assert_eq!(judge(good.clone()).severity, Severity::Ok);
        assert_eq!(judge(PinsLook { pinned: true, ..good.clone() }).severity, Severity::Ok);
        let finding = judge(PinsLook::default());
        assert!(finding.severity == Severity::Error && finding.fix.unwrap().contains("mount -t bpf"));
        let finding = judge(PinsLook { other_versions: vec!["v1".into()], ..good.clone() });
        assert!(
            finding.severity == Severity::Warning
                && finding.fix.unwrap().contains("--on-other-layout refuse")
        );
        let finding = judge(PinsLook { used_by: Some(7), ..good });
        assert!(finding.severity == Severity::Note && finding.found.contains("process 7"));
    }

    #[test]
    fn cgroups() {
        let judge = |facts: &Facts| judge_cgroup(facts).remove(0);
        let folder = || PathBuf::from("/sys/fs/cgroup");
        assert_eq!(judge(&Facts::Found { folder: folder(), partial: false }).severity, Severity::Ok);
        for (facts, severity, fix) in [
            (Facts::NotWanted, Severity::Note, "--cgroup"),
            (Facts::NotMounted, Severity::Error, "mount -t cgroup2"),
            (Facts::Missing(folder()), Severity::Error, "findmnt"),
            (Facts::NotCgroup2(folder()), Severity::Error, "findmnt"),
            (Facts::Found { folder: folder(), partial: true }, Severity::Warning, "host's cgroup2"),
        ] {
            let finding = judge(&facts);
            assert_eq!(finding.severity, severity, "{finding:?}");
            assert!(finding.fix.as_ref().unwrap().contains(fix), "{finding:?}");
        }
        assert_eq!(
            Facts::look(&Cgroup::Folder("/nonexistent".into())).unwrap(),
            Facts::Missing("/nonexistent".into())
        );
        assert_eq!(Facts::look(&Cgroup::Folder("/proc".into())).unwrap(), Facts::NotCgroup2("/proc".into()));
    }
}
