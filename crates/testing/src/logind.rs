//! A system bus with systemd-logind on it, as far as agents use them: a socket of its own, the few
//! methods of the bus that a client calls, delay locks, and announcements of a shutdown.

use std::io::{ErrorKind, PipeReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Result;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use tokio::net::UnixListener;
use tokio::runtime::{Builder, Runtime};
use zbus::message::Message;
use zbus::{Connection, Guid, connection, fdo, interface};

const MANAGER: &str = "/org/freedesktop/login1";
/// The unique name of logind on the bus.
const NAME: &str = ":1.0";

/// A running bus. It ends when it is dropped; agents that connect later find none.
#[derive(Debug)]
pub struct Logind {
    socket: PathBuf,
    state: Arc<Mutex<State>>,
    runtime: Option<Runtime>,
}

#[derive(Debug, Default)]
struct State {
    preparing: bool,
    delay: Duration,
    locks: Vec<Lock>,
    connections: Vec<Connection>,
}

/// A lock, which is held until its holder closes the other end.
#[derive(Debug)]
struct Lock {
    told: [String; 3],
    end: PipeReader,
}

struct Bus;

#[interface(name = "org.freedesktop.DBus")]
impl Bus {
    fn hello(&self) -> &'static str {
        ":1.1"
    }

    fn add_match(&self, _rule: &str) {}

    fn remove_match(&self, _rule: &str) {}

    fn get_name_owner(&self, _name: &str) -> &'static str {
        NAME
    }
}

struct Manager(Arc<Mutex<State>>);

#[interface(name = "org.freedesktop.login1.Manager")]
impl Manager {
    fn inhibit(&self, what: &str, who: &str, _why: &str, mode: &str) -> fdo::Result<zbus::OwnedFd> {
        let mut state = lock(&self.0);
        if state.preparing {
            return Err(fdo::Error::Failed(
                "The operation inhibition has been requested for is already running".into(),
            ));
        }
        let failed = |error: std::io::Error| fdo::Error::Failed(error.to_string());
        let (end, other) = std::io::pipe().map_err(failed)?;
        fcntl(end.as_fd(), FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).map_err(|error| failed(error.into()))?;
        state.locks.push(Lock { told: [what, who, mode].map(str::to_owned), end });
        Ok(OwnedFd::from(other).into())
    }

    #[zbus(property)]
    fn preparing_for_shutdown(&self) -> bool {
        lock(&self.0).preparing
    }

    #[zbus(property, name = "InhibitDelayMaxUSec")]
    fn inhibit_delay_max(&self) -> u64 {
        u64::try_from(lock(&self.0).delay.as_micros()).unwrap_or(u64::MAX)
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Logind {
    /// Starts a bus on a socket, with this `InhibitDelayMaxSec`.
    pub fn start(socket: &Path, delay: Duration) -> Result<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let state = Arc::new(Mutex::new(State { delay, ..State::default() }));
        let listener = {
            let _inside = runtime.enter();
            UnixListener::bind(socket)?
        };
        let serving = Arc::clone(&state);
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                // A client that breaks the connection off is no fault of the bus.
                if let Ok(connection) = serve(stream, &serving).await {
                    lock(&serving).connections.push(connection);
                }
            }
        });
        Ok(Self { socket: socket.to_owned(), state, runtime: Some(runtime) })
    }

    /// The value of `DBUS_SYSTEM_BUS_ADDRESS` for this bus.
    #[must_use]
    pub fn address(&self) -> String {
        format!("unix:path={}", self.socket.display())
    }

    /// The locks that are held: what, who and mode.
    #[must_use]
    pub fn locks(&self) -> Vec<[String; 3]> {
        let mut state = lock(&self.state);
        let is_held = |end: &mut PipeReader| matches!(end.read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock);
        state.locks.retain_mut(|lock| is_held(&mut lock.end));
        state.locks.iter().map(|lock| lock.told.clone()).collect()
    }

    /// Announces that a shutdown begins, or that it was called off.
    pub fn prepare(&self, begins: bool) -> Result<()> {
        let connections = {
            let mut state = lock(&self.state);
            state.preparing = begins;
            state.connections.clone()
        };
        let signal = Message::signal(MANAGER, "org.freedesktop.login1.Manager", "PrepareForShutdown");
        let signal = signal.sender(NAME).build(&begins)?;
        let Some(runtime) = &self.runtime else { return Ok(()) };
        runtime.block_on(async {
            for connection in connections {
                // Agents that ended meanwhile hear nothing.
                let _ = connection.send(&signal).await;
            }
        });
        Ok(())
    }
}

impl Drop for Logind {
    fn drop(&mut self) {
        lock(&self.state).connections.clear();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
        let _ = std::fs::remove_file(&self.socket);
    }
}

async fn serve(stream: tokio::net::UnixStream, state: &Arc<Mutex<State>>) -> Result<Connection> {
    let builder = connection::Builder::unix_stream(stream.into_std()?).server(Guid::generate()).p2p();
    let builder = builder.serve_at("/org/freedesktop/DBus", Bus);
    Ok(builder.serve_at(MANAGER, Manager(Arc::clone(state))).build().await?)
}
