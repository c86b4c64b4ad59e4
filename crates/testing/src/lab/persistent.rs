//! Persistent labs for users: they remain after the command that made them, and are found again by
//! name.

use std::fs;
use std::path::{Path, PathBuf};

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{Lab, folder};
use crate::netns::{Namespace, is_running};
use crate::pace::poll;

const PREFIX: &str = "tp-lab-";
const DRAWING: &str = "drawing.txt";
const PROCESSES: &str = "processes";

/// The prefix of the names of all namespaces of the lab with this name.
pub(super) fn id(name: &str) -> Result<String> {
    // With a dash, the name of one lab could be a prefix of another's.
    let plain =
        !name.is_empty() && name.chars().all(|letter| letter.is_ascii_lowercase() || letter.is_ascii_digit());
    ensure!(plain, "a lab's name is made of lower-case letters and digits, {name:?} is not");
    Ok(format!("{PREFIX}{name}"))
}

/// The names of all labs that are up.
pub fn list() -> Vec<String> {
    folder::labs().iter().filter_map(|id| id.strip_prefix(PREFIX).map(str::to_owned)).collect()
}

pub fn exists(name: &str) -> Result<bool> {
    Ok(folder::path(&id(name)?).exists())
}

/// The namespace of one machine of a lab.
pub fn namespace(name: &str, role: &str) -> Result<Namespace> {
    let id = id(name)?;
    ensure!(folder::path(&id).exists(), "no lab {name} is up; `cargo xtask lab up --name {name}` makes it");
    let roles = || {
        let names = Namespace::names(&format!("{id}-"));
        names.iter().filter_map(|found| found.get(id.len() + 1..)).collect::<Vec<_>>().join(", ")
    };
    Namespace::open(&format!("{id}-{role}")).with_context(|| format!("lab {name} has {}", roles()))
}

/// Leaves a lab up under its name, with the processes that were started in it.
pub fn keep(mut lab: Lab, processes: &[u32]) -> Result<()> {
    let folder = folder::path(&lab.id);
    let processes = processes.iter().map(|pid| format!("{pid}\n")).collect::<String>();
    fs::write(folder.join(PROCESSES), processes)?;
    fs::write(folder.join(DRAWING), lab.to_string())?;
    lab.folder.keep();
    let pods = lab.nodes.into_iter().flat_map(|node| {
        node.netns.keep();
        node.pods
    });
    pods.for_each(|pod| drop(pod.netns.keep()));
    lab.client.netns.keep();
    lab.router.keep();
    if let Some(router) = lab.second_router {
        router.keep();
    }
    Ok(())
}

/// The drawing of a lab that is up.
pub fn drawing(name: &str) -> Result<String> {
    let path = folder::path(&id(name)?).join(DRAWING);
    fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
}

/// Removes a lab: its processes, namespaces and folder.
pub fn down(name: &str) -> Result<()> {
    let id = id(name)?;
    let folder = folder::path(&id);
    let namespaces = Namespace::names(&format!("{id}-"));
    ensure!(folder.exists() || !namespaces.is_empty(), "no lab {name} is up");
    let inside = namespaces.iter().map(|name| Namespace::open(name)).collect::<Result<Vec<_>>>()?;
    for pid in recorded_processes(&folder) {
        // The pid may be that of another process by now; those of the lab are in one of its
        // namespaces.
        if inside.iter().any(|namespace| is_inside(pid, namespace)) {
            end(pid)?;
        }
    }
    for namespace in &namespaces {
        Namespace::remove(namespace)?;
    }
    folder::remove(&folder)
}

fn end(pid: u32) -> Result<()> {
    kill(Pid::from_raw(pid.try_into()?), Signal::SIGKILL).ok();
    let ended = poll(Duration::from_secs(5), || (!is_running(pid)).then_some(()));
    ended.with_context(|| format!("process {pid} does not end"))
}

fn recorded_processes(folder: &Path) -> Vec<u32> {
    let recorded = fs::read_to_string(folder.join(PROCESSES)).unwrap_or_default();
    recorded.lines().filter_map(|line| line.parse().ok()).collect()
}

fn is_inside(pid: u32, namespace: &Namespace) -> bool {
    use std::os::unix::fs::MetadataExt;
    let theirs = fs::metadata(PathBuf::from(format!("/proc/{pid}/ns/net")));
    let ours = fs::metadata(namespace.path());
    matches!((theirs, ours), (Ok(theirs), Ok(ours)) if theirs.ino() == ours.ino())
}
