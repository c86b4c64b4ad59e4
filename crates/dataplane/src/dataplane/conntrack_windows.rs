//! conntrack, if packets of established connections bypass it (`--local-delivery direct`).
//!
//! A segment that takes the stack again, mostly a FIN, lies outside of the windows that conntrack
//! has seen: it would be INVALID, which rules drop. And a connection whose data conntrack has seen
//! without the acknowledgement would be forgotten after five minutes of silence. Two sysctls of
//! this network namespace say otherwise; kube-proxy sets the first one by its flag
//! `--conntrack-tcp-be-liberal`.
//! <https://github.com/torvalds/linux/blob/v6.12/net/netfilter/nf_conntrack_proto_tcp.c>
//! (`tcp_in_window`, `nf_conntrack_tcp_packet`)

use std::{
    fs::{self, OpenOptions},
    io,
    path::Path,
};

use traffic_policy_ebpf::abi::RuntimeConfig;

use super::maps::mmap::{Mapped, config};

const FOLDER: &str = "/proc/sys/net/netfilter";
const LIBERAL: &str = "nf_conntrack_tcp_be_liberal";
const ESTABLISHED: &str = "nf_conntrack_tcp_timeout_established";
const UNACKNOWLEDGED: &str = "nf_conntrack_tcp_timeout_unacknowledged";

/// Sets the sysctls, where conntrack is in use, and notes what they were. The error says what is
/// in the way.
pub fn prepare(config: &mut Mapped<RuntimeConfig>) -> Result<(), String> {
    prepare_in(Path::new(FOLDER), |was| {
        if let Some(()) = was.strict {
            config.store(config::conntrack_was_strict, 1);
        }
        if let Some(seconds) = was.unacknowledged {
            config.store(config::conntrack_unacknowledged, seconds);
        }
    })
}

/// Sets the sysctls back to what [`prepare`] has noted.
pub fn restore(noted: &RuntimeConfig) {
    restore_in(Path::new(FOLDER), noted);
}

/// Whether conntrack is in use here, and takes a connection's packets only within the windows that
/// it has seen.
pub fn is_strict() -> bool {
    matches!(read(Path::new(FOLDER), LIBERAL), Ok(Some(0)))
}

/// Returns why `prepare` would fail, as far as that is seen without a change.
#[must_use]
pub fn obstacle() -> Option<String> {
    obstacle_in(Path::new(FOLDER))
}

/// The values that were changed.
#[derive(Debug, Default, PartialEq, Eq)]
struct Changed {
    strict: Option<()>,
    unacknowledged: Option<u32>,
}

/// A sysctl that is to be changed.
struct Change {
    name: &'static str,
    from: u32,
    to: u32,
}

impl Change {
    fn failed(&self, error: &io::Error) -> String {
        failed(self.name, error, &format!("set it to {}", self.to))
    }
}

fn failed(name: &str, error: &io::Error, remedy: &str) -> String {
    format!("{name} cannot be set ({error}): {remedy}, or let the agent write /proc/sys/net")
}

/// Returns what is to be changed, in this order. The error says what cannot be read.
fn changes(folder: &Path) -> Result<Vec<Change>, String> {
    let read = |name| read(folder, name).map_err(|error| failed(name, &error, "make it readable"));
    let mut changes = Vec::new();
    if let Some(0) = read(LIBERAL)? {
        changes.push(Change { name: LIBERAL, from: 0, to: 1 });
    }
    if let (Some(to), Some(from)) = (read(ESTABLISHED)?, read(UNACKNOWLEDGED)?)
        && from < to
    {
        changes.push(Change { name: UNACKNOWLEDGED, from, to });
    }
    Ok(changes)
}

fn obstacle_in(folder: &Path) -> Option<String> {
    let changes = match changes(folder) {
        Ok(changes) => changes,
        Err(error) => return Some(error),
    };
    // What is opened, and not written, is not changed.
    let open = |change: &Change| OpenOptions::new().write(true).open(folder.join(change.name));
    changes.iter().find_map(|change| open(change).err().map(|error| change.failed(&error)))
}

fn prepare_in(folder: &Path, note: impl FnOnce(Changed)) -> Result<(), String> {
    let mut changed = Changed::default();
    for change in changes(folder)? {
        write(folder, change.name, change.to).map_err(|error| change.failed(&error))?;
        if change.name == LIBERAL {
            changed.strict = Some(());
        } else {
            changed.unacknowledged = Some(change.from);
        }
    }
    note(changed);
    Ok(())
}

fn restore_in(folder: &Path, noted: &RuntimeConfig) {
    let mut back = Vec::new();
    if noted.conntrack_was_strict != 0 {
        back.push((LIBERAL, 0));
    }
    if noted.conntrack_unacknowledged != 0 {
        back.push((UNACKNOWLEDGED, noted.conntrack_unacknowledged));
    }
    for (name, value) in back {
        if let Err(error) = write(folder, name, value) {
            tracing::warn!("{name} cannot be set back to {value}: {error}");
        }
    }
}

/// Returns a number; `None` if there is no such sysctl, because conntrack is not in use.
fn read(folder: &Path, name: &str) -> io::Result<Option<u32>> {
    match fs::read_to_string(folder.join(name)) {
        Ok(text) => Ok(text.trim().parse().ok()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn write(folder: &Path, name: &str, value: u32) -> io::Result<()> {
    fs::write(folder.join(name), value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_changed_is_set_back() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let values = || [LIBERAL, ESTABLISHED, UNACKNOWLEDGED].map(|name| read(folder, name).unwrap());
        let prepared = || {
            let mut noted = None;
            prepare_in(folder, |changed| noted = Some(changed)).unwrap();
            noted.unwrap()
        };
        assert_eq!(prepared(), Changed::default(), "conntrack is not in use");
        for (name, value) in [(LIBERAL, 0), (ESTABLISHED, 86_400), (UNACKNOWLEDGED, 300)] {
            write(folder, name, value).unwrap();
        }
        assert_eq!(prepared(), Changed { strict: Some(()), unacknowledged: Some(300) });
        assert_eq!(values(), [Some(1), Some(86_400), Some(86_400)]);
        assert_eq!(prepared(), Changed::default(), "what is there already is not noted");
        restore_in(folder, &RuntimeConfig::default());
        assert_eq!(values(), [Some(1), Some(86_400), Some(86_400)]);
        let noted = RuntimeConfig {
            conntrack_was_strict: 1,
            conntrack_unacknowledged: 300,
            ..RuntimeConfig::default()
        };
        restore_in(folder, &noted);
        assert_eq!(values(), [Some(0), Some(86_400), Some(300)]);
    }

    #[test]
    fn what_cannot_be_set_is_said() {
        let folder = tempfile::tempdir().unwrap();
        // A folder in the file's place can neither be read nor written.
        fs::create_dir(folder.path().join(LIBERAL)).unwrap();
        let said = prepare_in(folder.path(), |_| ()).unwrap_err();
        assert!(said.starts_with("nf_conntrack_tcp_be_liberal cannot be set"), "{said}");
        assert_eq!(obstacle_in(folder.path()), Some(said));
        fs::remove_dir(folder.path().join(LIBERAL)).unwrap();
        for value in [0, 1] {
            write(folder.path(), LIBERAL, value).unwrap();
            assert_eq!(obstacle_in(folder.path()), None);
            assert_eq!(read(folder.path(), LIBERAL).unwrap(), Some(value), "nothing is written");
        }
    }
}
