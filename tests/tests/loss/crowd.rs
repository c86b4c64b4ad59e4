//! Connections that exist before a flood, some of which are active all the time while others stay
//! silent until they are used; and clients that connect meanwhile.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, spawn};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use socket2::SockRef;
use traffic_policy_testing::netns::Namespace;
use traffic_policy_testing::pace::scaled;
use traffic_policy_testing::traffic::{Answer, HeldConnections};

/// The time limit. A flood displaces other packets in every queue; the kernel retransmits them
/// after 1, 2, 4 … seconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// A client's connection to a pod.
pub struct Conversation(BufReader<TcpStream>);

impl Conversation {
    /// Opens a connection in the calling thread's namespace; one request has been answered when it
    /// returns.
    pub fn open(to: SocketAddr) -> Result<Self> {
        let stream =
            TcpStream::connect_timeout(&to, scaled(PATIENCE)).with_context(|| format!("opening {to}"))?;
        stream.set_read_timeout(Some(scaled(PATIENCE)))?;
        stream.set_nodelay(true)?;
        let mut conversation = Self(BufReader::new(stream));
        conversation.ask()?;
        Ok(conversation)
    }

    fn ask(&mut self) -> Result<()> {
        self.0.get_mut().write_all(b"still there?\n")?;
        let mut line = String::new();
        ensure!(self.0.read_line(&mut line)? > 0, "closed by the other side");
        Answer::parse(&line).map(drop)
    }

    pub fn client(&self) -> SocketAddr {
        self.0.get_ref().local_addr().unwrap()
    }

    /// Ends the connection by an RST, and returns the address of the client's end.
    pub fn reset(self) -> SocketAddr {
        SockRef::from(self.0.get_ref()).set_linger(Some(Duration::ZERO)).unwrap();
        self.client()
    }
}

/// Connections that must survive.
pub struct Crowd {
    talking: HeldConnections,
    silent: Vec<Conversation>,
}

impl Crowd {
    /// Opens `each` active and `each` silent connections, to the targets in turn.
    pub fn gather(client: &Namespace, targets: &[SocketAddr], each: usize) -> Self {
        raise_limit_of_files();
        let talking = HeldConnections::start(client, targets, each, Duration::from_secs(1)).unwrap();
        let silent = client.run(|| {
            targets.iter().cycle().take(each).map(|target| Conversation::open(*target).unwrap()).collect()
        });
        Self { talking, silent }
    }

    /// The addresses of the clients' ends of the silent connections.
    pub fn silent(&self) -> impl Iterator<Item = SocketAddr> {
        self.silent.iter().map(Conversation::client)
    }

    /// Sends a request on each silent connection, which must be answered.
    pub fn speak(&mut self, what: &str) {
        let mut broken = Vec::new();
        for held in &mut self.silent {
            if let Err(error) = held.ask() {
                broken.push(format!("{}: {error:#}", held.client()));
            }
            // A fault on a quiet wire shows at once; more of them would only take long.
            if broken.len() >= 3 {
                break;
            }
        }
        assert!(broken.is_empty(), "{what}: silent connections are lost: {broken:?}");
    }

    /// Checks that no active connection was lost meanwhile.
    pub fn leave(mut self, what: &str) {
        self.speak(what);
        let report = self.talking.finish();
        println!("{what}: {report}");
        assert!(report.broken.is_empty() && report.requests >= report.connections, "{what}: {report}");
    }
}

/// Clients that connect one after the other until they are stopped.
pub struct Newcomers {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(Vec<Duration>, Vec<String>)>,
}

impl Newcomers {
    pub fn start(client: &Namespace, to: SocketAddr) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (wish, client) = (stop.clone(), client.clone());
        let thread = spawn(move || {
            client.run(|| {
                let (mut took, mut failures) = (Vec::new(), Vec::new());
                while !wish.load(Ordering::Relaxed) {
                    let start = Instant::now();
                    match Conversation::open(to) {
                        Ok(_) => took.push(start.elapsed()),
                        Err(error) => failures.push(format!("{error:#}")),
                    }
                }
                (took, failures)
            })
        });
        Self { stop, thread }
    }

    /// Checks that nearly all were served, with the time-outs of a client's kernel. A flood may
    /// push out an unassured flow before a lost segment is retransmitted: such a client is reset,
    /// and connects anew.
    pub fn finish(self, what: &str) {
        self.stop.store(true, Ordering::Relaxed);
        let (took, failures) = self.thread.join().unwrap();
        let slow = took.iter().filter(|took| **took >= Duration::from_secs(1)).count();
        let slowest = took.iter().max();
        println!(
            "{what}: {} newcomers, {slow} took a second or more, slowest {slowest:?}; {failures:?}",
            took.len()
        );
        assert!(!took.is_empty() && failures.len() <= 2 + took.len() / 4, "{what}: {failures:?}");
    }
}

/// Raises the limit of open files: both ends of each connection belong to this process.
fn raise_limit_of_files() {
    let wanted = 16_384;
    // SAFETY: the structure outlives both calls.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        if limit.rlim_cur < wanted {
            limit.rlim_cur = wanted;
            limit.rlim_max = limit.rlim_max.max(wanted);
            assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
        }
    }
}
