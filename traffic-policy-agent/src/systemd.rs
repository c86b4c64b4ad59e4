//! Notifications to systemd, as sd_notify(3) defines them: ready, alive, reloading, stopping. None
//! is sent without `NOTIFY_SOCKET`.
//!
//! The crate `sd-notify` (0.5) would replace only how a message is spelt and sent, and it lacks
//! what is needed here: it knows no socket in the abstract namespace (`@…`), and each message opens
//! a socket that blocks, so that the run loop would wait for a slow systemd.

use std::{
    env,
    ffi::OsStr,
    io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            ffi::OsStrExt as _,
            net::{SocketAddr, UnixDatagram},
        },
    },
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use nix::time::{ClockId, clock_gettime};

/// Divisor of systemd's watchdog timeout that gives the interval of signs of life.
/// sd_watchdog_enabled(3) wants at least two in that time; the moments of the run loop's beats are
/// not exact.
const SIGNS: u32 = 4;

/// The notification socket. Cheap to clone; all clones share it.
#[derive(Clone, Debug, Default)]
pub struct Notifier(Option<Arc<Shared>>);

#[derive(Debug)]
struct Shared {
    socket: UnixDatagram,
    /// systemd's watchdog timeout.
    watchdog: Option<Duration>,
    sent: Mutex<Sent>,
}

#[derive(Debug, Default)]
struct Sent {
    ready: bool,
    alive: Option<Instant>,
    status: String,
}

impl Notifier {
    /// Makes the notifier that the environment describes. If the socket cannot be reached, nothing
    /// is sent, and the log states so.
    #[must_use]
    pub fn from_environment() -> Self {
        let Some(name) = env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else {
            return Self::default();
        };
        let number = |variable| env::var(variable).ok()?.parse::<u64>().ok();
        let own = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
        let watchdog = number("WATCHDOG_USEC").filter(|time| own && *time > 0).map(Duration::from_micros);
        Self::connect(&name, watchdog).unwrap_or_else(|error| {
            tracing::warn!("systemd is not told of anything: NOTIFY_SOCKET {}: {error}", name.display());
            Self::default()
        })
    }

    fn connect(name: &OsStr, watchdog: Option<Duration>) -> io::Result<Self> {
        let address = match name.as_bytes() {
            // The name is in the abstract namespace.
            [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest)?,
            [b'/', ..] => SocketAddr::from_pathname(name)?,
            _ => {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    "neither a path nor an abstract name",
                ));
            }
        };
        let socket = UnixDatagram::unbound()?;
        socket.connect_addr(&address)?;
        // The run loop must not block.
        socket.set_nonblocking(true)?;
        Ok(Self(Some(Arc::new(Shared { socket, watchdog, sent: Mutex::default() }))))
    }

    /// Notifies that the maps are filled.
    pub fn ready(&self) {
        if let Some(shared) = &self.0 {
            shared.sent().ready = true;
            shared.send("READY=1");
        }
    }

    /// Notifies that the configuration is being read again. Before the agent is ready, nothing is
    /// sent: systemd still waits for readiness.
    pub fn reloading(&self) {
        if !self.is_ready() {
            return;
        }
        let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from).unwrap_or_default();
        self.send(&format!("RELOADING=1\nMONOTONIC_USEC={}", now.as_micros()));
    }

    /// Notifies that the configuration has been read again.
    pub fn reloaded(&self) {
        if self.is_ready() {
            self.send("READY=1");
        }
    }

    /// Notifies that the agent is about to exit.
    pub fn stopping(&self) {
        self.send("STOPPING=1");
    }

    /// Sends one line for `systemctl status`, if it differs from the previous one.
    pub fn status(&self, text: &str) {
        let Some(shared) = &self.0 else { return };
        let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let mut sent = shared.sent();
        if sent.status != line {
            shared.send(&format!("STATUS={line}"));
            sent.status = line;
        }
    }

    /// Sends a sign of life to systemd's watchdog: the run loop has come round.
    pub fn beat(&self) {
        let Some(shared) = &self.0 else { return };
        let Some(watchdog) = shared.watchdog else { return };
        let mut sent = shared.sent();
        if sent.alive.is_none_or(|alive| alive.elapsed() >= watchdog / SIGNS) {
            shared.send("WATCHDOG=1");
            sent.alive = Some(Instant::now());
        }
    }

    fn is_ready(&self) -> bool {
        self.0.as_ref().is_some_and(|shared| shared.sent().ready)
    }

    fn send(&self, message: &str) {
        if let Some(shared) = &self.0 {
            shared.send(message);
        }
    }
}

impl Shared {
    fn sent(&self) -> MutexGuard<'_, Sent> {
        // A thread that panics leaves each field whole.
        self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, message: &str) {
        if let Err(error) = self.socket.send(message.as_bytes()) {
            tracing::debug!("systemd did not get {message:?}: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(socket: &UnixDatagram) -> Vec<String> {
        socket.set_nonblocking(true).unwrap();
        let mut bytes = [0; 4096];
        std::iter::from_fn(|| {
            let length = socket.recv(&mut bytes).ok()?;
            Some(String::from_utf8_lossy(&bytes[..length]).into_owned())
        })
        .collect()
    }

    #[test]
    fn by_a_path_and_by_an_abstract_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let name = format!("traffic-policy-test-{}", std::process::id());
        let named = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        for (socket, address) in
            [(UnixDatagram::bind(&path).unwrap(), path.into_os_string()), (named, format!("@{name}").into())]
        {
            let notifier = Notifier::connect(&address, None).unwrap();
            // The agent is still starting.
            notifier.reloading();
            notifier.reloaded();
            notifier.ready();
            notifier.status("all is\nwell");
            notifier.status("all is well");
            notifier.reloading();
            notifier.reloaded();
            notifier.stopping();
            // Without a watchdog timeout nothing is sent.
            notifier.beat();
            let heard = heard(&socket);
            assert_eq!(heard[..2], ["READY=1", "STATUS=all is well"]);
            assert!(heard[2].starts_with("RELOADING=1\nMONOTONIC_USEC="), "{heard:?}");
            assert_eq!(heard[3..], ["READY=1", "STOPPING=1"]);
        }
        assert!(Notifier::connect(OsStr::new("vsock:2:1"), None).is_err());
        assert!(Notifier::connect(OsStr::new("/nowhere/notify"), None).is_err());
    }

    #[test]
    fn a_sign_of_life_no_more_often_than_needed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        let long = Notifier::connect(path.as_os_str(), Some(Duration::from_secs(3600))).unwrap();
        (0..3).for_each(|_| long.beat());
        assert_eq!(heard(&socket), ["WATCHDOG=1"]);
        let short = Notifier::connect(path.as_os_str(), Some(Duration::from_nanos(4))).unwrap();
        (0..3).for_each(|_| {
            short.beat();
            // The sleep is longer than systemd waits: the next sign of life is due, however fast
            // the machine is.
            std::thread::sleep(Duration::from_millis(1));
        });
        assert_eq!(heard(&socket), ["WATCHDOG=1"; 3]);
    }
}
