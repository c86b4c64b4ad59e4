//! A question to another node: whether it is alive.
//!
//! The node and some of its endpoints are asked at once by all means that a node's firewall may
//! leave: its neighbour entry, ICMP echo and TCP. One answer suffices; a node is silent only if all
//! of them fail in each of three rounds. An answer can be forged, silence cannot: whoever could
//! suppress all of these answers is between the nodes, and could drop the traffic as well.
//!
//! The questions are asked by a thread that blocks in poll(2), and not by tasks: the runtime's
//! threads may be busy with a large write, and then a reply that lies in a socket would be
//! overlooked.

mod echo;
mod knock;
mod neighbour;

use std::{
    collections::BTreeSet,
    fmt, io,
    net::{IpAddr, SocketAddr},
    os::fd::AsFd as _,
    sync::Arc,
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::sync::Semaphore;
use traffic_policy_cluster::model::Protocol;

use self::{echo::Echo, knock::Knock, neighbour::Prober};
use super::way::HopAddress;

/// The rounds of one attempt, and the time for the answers of each.
const ROUNDS: u32 = 3;
const ROUND: Duration = Duration::from_millis(100);
/// The longest time between two looks at the neighbour entries, for which poll(2) does not wait.
const LOOK: Duration = Duration::from_millis(10);
/// The delay of a timer from which on the silence says more about this node than about the other.
const LATE: Duration = Duration::from_millis(100);
/// The attempts, if this node is late in each.
const ATTEMPTS: usize = 3;
/// The most nodes that are asked at a time: each takes a thread and up to 32 sockets.
const AT_ONCE: usize = 32;
/// The most addresses and endpoints of a node that are asked.
const ADDRESSES: usize = 4;
const ENDPOINTS: usize = 3;

/// The means by which a node can be asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Question {
    /// The addresses of its Node object; empty if they are unknown.
    pub addresses: Vec<IpAddr>,
    /// The neighbour that it is, if it is known as a next hop alone.
    pub hop: Option<HopAddress>,
    /// Some of its endpoints.
    pub endpoints: Vec<(SocketAddr, Protocol)>,
    /// The port on which the node's proxy serves its health.
    pub health_port: u16,
}

/// A sign of life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// The address was resolved anew.
    Neighbour(IpAddr),
    Echo(IpAddr),
    /// A SYN was answered, by a SYN or a reset.
    Tcp(SocketAddr),
}

impl fmt::Display for Sign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Neighbour(address) if address.is_ipv4() => write!(f, "ARP of {address}"),
            Self::Neighbour(address) => write!(f, "NDP of {address}"),
            Self::Echo(address) => write!(f, "ping of {address}"),
            Self::Tcp(address) => write!(f, "TCP {address}"),
        }
    }
}

/// The answer to a [`Question`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Alive(Sign),
    /// Nobody answered any of these questions.
    Silent(Vec<Sign>),
    /// The silence proves nothing, for this reason.
    Unjudged(String),
}

/// The limit of concurrent questions. Cheap to clone; all clones share it.
#[derive(Clone, Debug)]
pub struct Asker(Arc<Semaphore>);

impl Default for Asker {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(AT_ONCE)))
    }
}

impl Asker {
    /// Asks a node, which takes 300 ms unless it answers before. It waits while too many others are
    /// asked.
    pub async fn ask(&self, question: Question) -> Answer {
        let Ok(permit) = Arc::clone(&self.0).acquire_owned().await else {
            return Answer::Unjudged("nobody asks any more".to_owned());
        };
        let asked = tokio::task::spawn_blocking(move || {
            let answer = judge(|| Probes::open(&question), Instant::now);
            drop(permit);
            answer
        });
        asked.await.unwrap_or_else(|error| Answer::Unjudged(format!("asking failed: {error}")))
    }
}

/// Asks, and again if this node itself was late. `open` begins an attempt; `now`: the clock.
fn judge(mut open: impl FnMut() -> io::Result<Probes>, now: impl Fn() -> Instant) -> Answer {
    for _ in 0..ATTEMPTS {
        let mut probes = match open() {
            Ok(probes) => probes,
            Err(error) => return Answer::Unjudged(format!("it cannot be asked: {error}")),
        };
        match probes.attempt(&now) {
            Silence::Broken(sign) => return Answer::Alive(sign),
            Silence::Late => {}
            Silence::Complete if probes.asked.is_empty() => {
                let why =
                    probes.failure.map_or_else(|| "nothing is known of it".to_owned(), |why| why.to_string());
                return Answer::Unjudged(format!("it cannot be asked: {why}"));
            }
            Silence::Complete => {
                let unasked = probes.hop.filter(|hop| !probes.asked.contains(&Sign::Neighbour(*hop)));
                return match unasked {
                    Some(hop) => {
                        Answer::Unjudged(format!("nobody resolves {hop}, and others may be behind it"))
                    }
                    None => Answer::Silent(probes.asked),
                };
            }
        }
    }
    Answer::Unjudged("this node itself is late: it lacks CPU time".to_owned())
}

/// The result of one attempt.
enum Silence {
    Broken(Sign),
    Complete,
    /// Complete, but this node was not there to hear an answer in time.
    Late,
}

/// The sockets of one attempt.
#[derive(Default)]
struct Probes {
    neighbours: Option<Prober>,
    echoes: Vec<Echo>,
    /// The addresses to connect to, and the connections that are under way.
    ports: Vec<SocketAddr>,
    knocks: Vec<Knock>,
    /// The questions that were sent.
    asked: Vec<Sign>,
    /// The next hop that is asked, whose entry alone speaks for all that is behind it.
    hop: Option<IpAddr>,
    /// The reason why the last question that was not sent was not.
    failure: Option<io::Error>,
}

impl Probes {
    fn open(question: &Question) -> io::Result<Self> {
        let hop = question.hop.and_then(|hop| hop.global());
        let addresses = || hop.iter().chain(&question.addresses).take(ADDRESSES);
        let tcp = question.endpoints.iter().filter(|(_, protocol)| *protocol == Protocol::Tcp);
        let ports = addresses().map(|address| SocketAddr::new(*address, question.health_port));
        let ports = ports.chain(tcp.take(ENDPOINTS).map(|(address, _)| *address)).collect();
        let mut pods = BTreeSet::new();
        let endpoints = question.endpoints.iter().map(|(address, _)| address.ip());
        let pods = endpoints.filter(|address| {
            !question.addresses.contains(address) && hop != Some(*address) && pods.insert(*address)
        });
        let mut failure = None;
        let mut echoes = Vec::new();
        for address in addresses().copied().chain(pods.take(ENDPOINTS)) {
            match Echo::open(address) {
                Ok(echo) => echoes.push(echo),
                Err(error) => failure = Some(error),
            }
        }
        let neighbours = match (addresses().next(), question.hop) {
            (None, None) => None,
            _ => Some(Prober::open(addresses().copied(), question.hop)?),
        };
        let hop = question.hop.map(|hop| hop.address);
        Ok(Self { neighbours, echoes, ports, knocks: Vec::new(), asked: Vec::new(), hop, failure })
    }

    /// Asks in all rounds, until the first answer.
    fn attempt(&mut self, now: &impl Fn() -> Instant) -> Silence {
        let start = now();
        let mut late = false;
        for round in 0..=ROUNDS {
            let due = start + ROUND * round;
            loop {
                let left = due.saturating_duration_since(now());
                // What is queued already is looked at even if the time is over: nobody may have
                // been there to look before.
                if let Some(sign) = self.wait(left.min(LOOK)) {
                    return Silence::Broken(sign);
                }
                if left.is_zero() {
                    break;
                }
            }
            late |= now().saturating_duration_since(due) > LATE;
            if round < ROUNDS
                && let Some(sign) = self.send()
            {
                return Silence::Broken(sign);
            }
        }
        if late { Silence::Late } else { Silence::Complete }
    }

    /// Sends the questions of one round. Some are answered at once.
    fn send(&mut self) -> Option<Sign> {
        let Self { neighbours, echoes, ports, knocks, asked, failure, .. } = self;
        let mut sent = |sign: Sign, result: io::Result<()>| match result {
            Ok(()) if asked.contains(&sign) => {}
            Ok(()) => asked.push(sign),
            Err(error) => *failure = Some(error),
        };
        for (address, result) in neighbours.iter_mut().flat_map(Prober::send) {
            sent(Sign::Neighbour(address), result);
        }
        for echo in echoes {
            sent(Sign::Echo(echo.address), echo.send());
        }
        for address in ports {
            match Knock::send(*address) {
                Ok(knock) => {
                    sent(Sign::Tcp(*address), Ok(()));
                    knocks.push(knock);
                }
                Err(knock::Failure::Answered) => return Some(Sign::Tcp(*address)),
                Err(knock::Failure::Unsent(error)) => sent(Sign::Tcp(*address), Err(error)),
            }
        }
        None
    }

    /// Waits for an answer, and looks at all sockets.
    fn wait(&mut self, time: Duration) -> Option<Sign> {
        {
            let echoes = self.echoes.iter().map(|echo| (echo.as_fd(), PollFlags::POLLIN));
            let knocks = self.knocks.iter().map(|knock| (knock.as_fd(), PollFlags::POLLOUT));
            let mut fds: Vec<_> = echoes.chain(knocks).map(|(fd, flags)| PollFd::new(fd, flags)).collect();
            // A signal that interrupts it only makes the next look earlier.
            let _ = poll(&mut fds, PollTimeout::try_from(time).unwrap_or(PollTimeout::ZERO));
        }
        if let Some(address) = self.neighbours.as_mut().and_then(Prober::answered) {
            return Some(Sign::Neighbour(address));
        }
        if let Some(echo) = self.echoes.iter_mut().find_map(|echo| echo.is_answered().then_some(echo.address))
        {
            return Some(Sign::Echo(echo));
        }
        let mut answered = None;
        self.knocks.retain(|knock| match knock.look() {
            knock::State::Waiting => true,
            knock::State::Answered => {
                answered = Some(Sign::Tcp(knock.address));
                true
            }
            // Each round connects anew.
            knock::State::Failed => false,
        });
        answered
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn ask(question: &Question, now: impl Fn() -> Instant) -> Answer {
        judge(|| Probes::open(question), now)
    }

    fn tcp(address: SocketAddr) -> Question {
        Question { endpoints: vec![(address, Protocol::Tcp)], ..Question::default() }
    }

    /// A clock that jumps with each look stands for a process that does not run in between.
    fn jumping() -> impl Fn() -> Instant {
        let (real, jumped) = (Instant::now(), Cell::new(Duration::ZERO));
        move || {
            jumped.set(jumped.get() + ROUND + LATE);
            real + jumped.get()
        }
    }

    #[test]
    fn nothing_known_is_no_death() {
        let answer = ask(&Question::default(), Instant::now);
        assert!(matches!(&answer, Answer::Unjudged(why) if why.contains("nothing is known")), "{answer:?}");
    }

    /// A reset is as good as a connection, and what has arrived counts however late it is read.
    #[test]
    fn open_and_closed_ports_answer() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let question = tcp(listener.local_addr().unwrap());
        assert!(matches!(ask(&question, Instant::now), Answer::Alive(_)));
        assert!(matches!(ask(&question, jumping()), Answer::Alive(_)));
        drop(listener);
        assert!(matches!(ask(&question, Instant::now), Answer::Alive(_)));
        assert!(matches!(ask(&question, jumping()), Answer::Alive(_)));
    }

    /// Nothing answers where there is no socket.
    #[test]
    fn a_late_asker_asks_again_and_never_judges() {
        let sign = Sign::Echo([192, 0, 2, 1].into());
        let mut opened = 0;
        let mut open = || {
            opened += 1;
            Ok(Probes { asked: vec![sign], ..Probes::default() })
        };
        let answer = judge(&mut open, jumping());
        assert!(matches!(&answer, Answer::Unjudged(why) if why.contains("late")), "{answer:?}");
        // The machine that runs this may itself be late, and then this asks again, too.
        let started = Instant::now();
        let answer = judge(&mut open, || started + (Instant::now() - started) / 10);
        assert_eq!(answer, Answer::Silent(vec![sign]));
        assert_eq!(opened, ATTEMPTS + 1);
    }

    /// The thread of each question and its sockets are bounded.
    #[tokio::test]
    async fn a_question_waits_while_too_many_are_asked() {
        let asker = Asker::default();
        let all = asker.0.acquire_many(AT_ONCE as u32).await.unwrap();
        let waiting = asker.ask(Question::default());
        tokio::pin!(waiting);
        assert!(futures::poll!(&mut waiting).is_pending());
        drop(all);
        assert!(matches!(waiting.await, Answer::Unjudged(_)));
    }
}
