//! Network namespaces as values: they are created, entered, used to start processes, and removed
//! when dropped.
//!
//! A namespace belongs to a thread, not to a process, so everything here enters with `setns` on a
//! thread of its own. That changes the network only: unlike `ip netns exec`, mounts stay as they
//! are, so cgroup2 and any bpffs remain visible (and `/sys/class/net` shows the devices of the
//! namespace that mounted it, not of this one).

mod process;
mod running;

use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{ops, thread};

use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use tokio::runtime::Runtime;

pub use self::process::{Process, is_running};
pub use self::running::{Running, Stop};

/// The folder of the names that `ip netns` uses, so that it works on a lab.
const NAMES: &str = "/run/netns";

/// A handle on a named network namespace. Cloning it is cheap; dropping it removes nothing (see
/// [`Owned`]).
#[derive(Clone, Debug)]
pub struct Namespace {
    name: String,
    file: Arc<File>,
}

/// A namespace whose name is removed when this value is dropped. The kernel frees the namespace
/// itself once no process, thread or handle refers to it.
#[derive(Debug)]
pub struct Owned(Namespace);

impl Namespace {
    /// Creates a new namespace, whose loopback device is still down, and a name for it.
    pub fn create(name: &str) -> Result<Owned> {
        ensure_root()?;
        let path = Path::new(NAMES).join(name);
        share_names_directory().with_context(|| format!("preparing {NAMES}"))?;
        File::create_new(&path).with_context(|| format!("creating {}", path.display()))?;
        let bound = thread::scope(|scope| {
            // The thread leaves its own namespace for good, so no other code may run on it.
            let maker = scope.spawn(|| -> Result<()> {
                unshare(CloneFlags::CLONE_NEWNET).context("making a network namespace")?;
                let own = Some("/proc/thread-self/ns/net");
                mount(own, &path, None::<&str>, MsFlags::MS_BIND, None::<&str>)
                    .with_context(|| format!("binding the namespace to {}", path.display()))
            });
            maker.join().unwrap_or_else(|panic| resume_unwind(panic))
        });
        if let Err(error) = bound {
            fs::remove_file(&path).ok();
            return Err(error);
        }
        Ok(Owned(Self::open(name)?))
    }

    /// Opens a handle on an existing namespace.
    pub fn open(name: &str) -> Result<Self> {
        let path = Path::new(NAMES).join(name);
        let file = File::open(&path).with_context(|| format!("no network namespace {name}"))?;
        Ok(Self { name: name.to_owned(), file: Arc::new(file) })
    }

    /// Removes the name. A name that is gone already is not an error: two labs may clear the same
    /// leftover.
    pub fn remove(name: &str) -> Result<()> {
        let path = Path::new(NAMES).join(name);
        match umount2(&path, MntFlags::MNT_DETACH) {
            Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
            Err(error) => return Err(error).with_context(|| format!("unmounting {}", path.display())),
        }
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("removing {}", path.display()))
            }
            _ => Ok(()),
        }
    }

    /// The names of all namespaces that start with `prefix`.
    pub fn names(prefix: &str) -> Vec<String> {
        let entries = fs::read_dir(NAMES).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let mut names: Vec<_> = names.filter(|name| name.starts_with(prefix)).collect();
        names.sort();
        names
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The path for `nsenter --net=PATH`.
    pub fn path(&self) -> PathBuf {
        Path::new(NAMES).join(&self.name)
    }

    /// Moves the calling thread into the namespace for good, so only threads that end afterwards
    /// may call this.
    pub fn enter(&self) -> Result<()> {
        setns(&*self.file, CloneFlags::CLONE_NEWNET).with_context(|| format!("entering {}", self.name))
    }

    /// Runs `work` inside on a thread of its own and returns its result; a panic inside is a panic
    /// here.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let inside = thread::Builder::new().name(self.name.clone()).spawn_scoped(scope, || {
                self.enter().unwrap_or_else(|error| panic!("{error:#}"));
                work()
            });
            let inside = inside.unwrap_or_else(|error| panic!("no thread for {}: {error}", self.name));
            inside.join().unwrap_or_else(|panic| resume_unwind(panic))
        })
    }

    /// A variant of [`Self::run`] for async work: sockets and spawned tasks all belong to the
    /// namespace.
    pub fn block_on<T: Send>(&self, work: impl AsyncFnOnce() -> T + Send) -> T {
        self.run(|| runtime().block_on(work()))
    }

    /// Sets a sysctl of the namespace, for example `net.ipv4.ip_forward`. Dots inside device names
    /// are not supported.
    pub fn sysctl(&self, key: &str, value: &str) -> Result<()> {
        self.sysctls(&[(key, value)])
    }

    /// Sets several sysctls at once, like [`Self::sysctl`].
    pub fn sysctls(&self, settings: &[(&str, &str)]) -> Result<()> {
        // /proc/sys/net shows the namespace of the thread that opens the file.
        self.run(|| {
            for (key, value) in settings {
                ensure!(key.starts_with("net."), "{key} does not belong to a network namespace");
                let path = format!("/proc/sys/{}", key.replace('.', "/"));
                fs::write(&path, value).with_context(|| format!("writing {value} to {path}"))?;
            }
            Ok(())
        })
    }
}

impl AsFd for Namespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl AsRawFd for Namespace {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

impl Owned {
    /// Leaves the name in place.
    pub fn keep(self) -> Namespace {
        let namespace = self.0.clone();
        std::mem::forget(self);
        namespace
    }
}

impl ops::Deref for Owned {
    type Target = Namespace;

    fn deref(&self) -> &Namespace {
        &self.0
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if let Err(error) = Namespace::remove(self.name()) {
            eprintln!("{error:#}");
        }
    }
}

/// Fails with one sentence about the required privileges, instead of an EPERM from some system
/// call.
pub fn ensure_root() -> Result<()> {
    ensure!(nix::unistd::geteuid().is_root(), "network namespaces need root: run this as root (sudo -E)");
    Ok(())
}

/// A runtime whose tasks all stay on the calling thread, and so in its namespace.
pub(crate) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap_or_else(|error| panic!("no tokio runtime: {error}"))
}

/// Makes the directory a shared mount, as `ip netns add` would. If `ip` did it later, it would
/// mount the directory over itself, and names bound before could be unmounted only in the upper
/// copy.
fn share_names_directory() -> Result<()> {
    fs::create_dir_all(NAMES)?;
    // Two labs that start together must not mount it twice. The lock is released with the file.
    let directory = File::open(NAMES)?;
    directory.lock()?;
    let share =
        || mount(None::<&str>, NAMES, None::<&str>, MsFlags::MS_SHARED | MsFlags::MS_REC, None::<&str>);
    if share() == Err(Errno::EINVAL) {
        let bind = MsFlags::MS_BIND | MsFlags::MS_REC;
        mount(Some(NAMES), NAMES, None::<&str>, bind, None::<&str>)?;
        share()?;
    }
    Ok(())
}
