//! UDP requests like those of resolvers: each from an address and port of its own, answered once,
//! all to one endpoint on another node, so that each occupies a source port of the node towards it
//! for a while.
//!
//! The group runs only if it is named, since it takes minutes: ports are exhausted only after the
//! time-out of the first requests.

use std::{
    collections::VecDeque,
    io::ErrorKind,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread::{self, sleep},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::libc;
use socket2::{Domain, Socket, Type};
use traffic_policy_testing::{
    agent::Agent,
    kube_proxy::Backend,
    netns::Namespace,
    object::{Manifests, Port},
};

use super::{
    fixture::{DOWNLINK, NODE, SENDERS, SERVER, WireTestbed},
    generator::{TARGET_PORT, later},
    kube_proxy::{self, KubeProxy},
    plan::SERVICES,
    rules,
    services::{HTTP_NODE_PORT, NODE_NAME, objects_with, services},
    subject::Kind,
};
use crate::{
    Effort,
    report::{Goal, Report, Row, Unit},
};

const GROUP: &str = "one-shot questions";
/// Requests per second, for each subject.
const RATE: u32 = 2_000;
/// Number of client addresses, used one after the other; the next round uses another port.
const ADDRESSES: u32 = 50_000;
const FIRST_PORT: u16 = 10_000;
/// Time after which a request counts as unanswered.
const PATIENCE: Duration = Duration::from_secs(2);
/// Maximum number of requests sent at once after the machine stalled: more would not fit the ring
/// of a veth.
const BURST: u32 = 32;
/// Size of the server's queue in bytes.
const QUEUE: usize = 4 << 20;

const SUBJECTS: [Kind; 4] =
    [Kind::Xdp(SERVICES), Kind::Tc(SERVICES), Kind::Nftables(SERVICES), Kind::Iptables(SERVICES)];
const SENT: &str = "sent";
const ANSWERED: &str = "answered";
const DROPPED: &str = "dropped";

fn name(kind: Kind, count: &str) -> String {
    format!("{kind}: {count}")
}

pub(crate) fn measure(effort: Effort, report: &mut Report) -> Result<()> {
    let mut wanted = Vec::new();
    for kind in SUBJECTS {
        let names = [SENT, ANSWERED, DROPPED].map(|count| name(kind, count));
        let names: Vec<_> = names.into_iter().filter(|name| report.wants_by_name(GROUP, name)).collect();
        if !names.is_empty() {
            wanted.push((kind, names));
        }
    }
    if wanted.is_empty() {
        return Ok(());
    }
    raise_limit_of_files()?;
    let mut subjects = Vec::new();
    for (kind, names) in wanted {
        match Subject::start(kind) {
            Ok(subject) => subjects.push((subject, names)),
            Err(error) => {
                names.iter().for_each(|name| report.skip(GROUP, name, format!("{error:#}")));
            }
        }
    }
    report.note(
        GROUP,
        format!("{RATE} a second for {:?}, to one endpoint, {SERVICES} Services", effort.questions),
    );
    let counts: Vec<Result<Counts>> = thread::scope(|scope| {
        let ask = |(subject, _): &'_ (Subject, _)| subject.ask(effort.questions);
        let running: Vec<_> = subjects.iter().map(|subject| scope.spawn(move || ask(subject))).collect();
        running
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    let mut dropped_by_us = Vec::new();
    for ((subject, names), counts) in subjects.iter().zip(counts) {
        let counts = counts.with_context(|| subject.kind.to_string())?;
        let ours = matches!(subject.kind, Kind::Xdp(_) | Kind::Tc(_));
        for (count, value) in
            [(SENT, counts.sent), (ANSWERED, counts.answered), (DROPPED, counts.sent - counts.answered)]
        {
            let row = Row::new(GROUP, &name(subject.kind, count), Unit::Count, &[value as f64]);
            let row = if ours && count == DROPPED { row.goal(Goal::AtMost(0.0)) } else { row };
            if names.contains(&row.name) {
                report.add(row);
            }
            if ours && count == DROPPED && value != 0 {
                dropped_by_us.push(format!(
                    "{value} of {} by {} ({} of them on the way there)",
                    counts.sent,
                    subject.kind,
                    counts.sent - counts.arrived
                ));
            }
        }
        let (arrived, rate) = (counts.arrived, counts.sent as f64 / counts.took.as_secs_f64());
        report.note(
            &format!("{GROUP}, {}", subject.kind),
            format!("{rate:.0} a second; {arrived} reached the server"),
        );
    }
    ensure!(dropped_by_us.is_empty(), "questions were dropped: {}", dropped_by_us.join(", "));
    Ok(())
}

struct Counts {
    sent: u64,
    /// Number of requests that arrived at the server.
    arrived: u64,
    answered: u64,
    took: Duration,
}

/// A forwarder, and the server that answers.
struct Subject {
    kind: Kind,
    // The agent is dropped before the fixture, whose folder it uses.
    _agent: Option<Agent>,
    _kube_proxy: Option<KubeProxy>,
    fixture: WireTestbed,
}

impl Subject {
    fn start(kind: Kind) -> Result<Self> {
        let fixture = WireTestbed::build(&format!("shot-{}", kind.short()))?;
        let WireTestbed { folder, node, client, .. } = &fixture;
        // On the loopback device all addresses of a network are local.
        client.netlink(async |net| net.address("lo", SENDERS.into(), 16).await)?;
        let services = services(SERVICES);
        let objects = objects_with(&services, Port::udp);
        let (mut agent, mut kube_proxy) = (None, None);

        let file = folder.logs().join("rules");
        match kind {
            Kind::Nftables(_) if kube_proxy::program().is_some() => {
                let listing = ["nft", "list", "table", "ip", "kube-proxy"];
                kube_proxy = Some(KubeProxy::start(&fixture, "nftables", objects, &listing)?);
            }
            Kind::Iptables(_) if kube_proxy::program().is_some() => {
                let listing = ["iptables-save", "-t", "nat"];
                kube_proxy = Some(KubeProxy::start(&fixture, "iptables", objects, &listing)?);
            }
            Kind::Nftables(_) => rules::write(node, Backend::Nftables, &services, "udp", &file)?,
            Kind::Iptables(_) => rules::write(node, Backend::IptablesNft, &services, "udp", &file)?,
            _ => {
                Manifests::at(&folder.manifests())?.write("all", &objects)?;
                let attach = if matches!(kind, Kind::Tc(_)) { "tc" } else { "xdp" };
                let started = Agent::in_folder(folder, NODE_NAME, node).attach(attach);
                let started = started.flags(&["--device", DOWNLINK]).start()?;
                started.wait_ready(Duration::from_secs(60))?;
                agent = Some(started);
            }
        }
        Ok(Self { kind, _agent: agent, _kube_proxy: kube_proxy, fixture })
    }

    /// Sends requests for this time, and waits for the last answers.
    fn ask(&self, length: Duration) -> Result<Counts> {
        let server = self.fixture.endpoint.run(listen)?;
        let (stop, arrived) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            let answering = scope.spawn(|| answer(&server, &stop, &arrived));
            let asked = ask(&self.fixture.client, length);
            stop.store(true, Ordering::Relaxed);
            answering.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            let (sent, answered, took) = asked?;
            Ok(Counts { sent, arrived: arrived.load(Ordering::Relaxed), answered, took })
        })
    }
}

fn listen() -> Result<UdpSocket> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)?;
    // The size exceeds net.core.rmem_max, which does not belong to a namespace.
    let size = libc::c_int::try_from(QUEUE)?;
    // SAFETY: the option's value outlives the call.
    let result = unsafe {
        let value = (&raw const size).cast();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&socket);
        libc::setsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_RCVBUFFORCE,
            value,
            size_of_val(&size) as libc::socklen_t,
        )
    };
    ensure!(result == 0, "a longer queue: {}", std::io::Error::last_os_error());
    socket.bind(&SocketAddr::from((SERVER, TARGET_PORT)).into())?;
    socket.set_read_timeout(Some(Duration::from_millis(100)))?;
    Ok(socket.into())
}

/// Sends each request back.
fn answer(server: &UdpSocket, stop: &AtomicBool, arrived: &AtomicU64) -> Result<()> {
    let mut buffer = [0; 64];
    while !stop.load(Ordering::Relaxed) {
        match server.recv_from(&mut buffer) {
            Ok((length, from)) => {
                arrived.fetch_add(1, Ordering::Relaxed);
                server.send_to(&buffer[..length], from)?;
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => return Err(error).context("answering"),
        }
    }
    Ok(())
}

/// Returns the requests sent, those answered, and the time that sending took.
fn ask(client: &Namespace, length: Duration) -> Result<(u64, u64, Duration)> {
    client.run(|| {
        let frontend = SocketAddr::from((NODE, HTTP_NODE_PORT));
        let mut open: VecDeque<(UdpSocket, u64, Instant)> = VecDeque::new();
        let (mut sent, mut answered) = (0_u64, 0_u64);
        let started = Instant::now();
        let mut last = started;
        // Number of requests that are due.
        let mut due = 0.0;
        while started.elapsed() < length {
            let now = Instant::now();
            due = (due + (now - last).as_secs_f64() * f64::from(RATE)).min(f64::from(BURST));
            last = now;
            while due >= 1.0 {
                due -= 1.0;
                open.push_back((question(sent, frontend)?, sent, Instant::now()));
                sent += 1;
            }
            answered += collect(&mut open)?;
            // A request is due every 500 µs at 2,000 a second; the CPU belongs to the packet path
            // meanwhile.
            sleep(Duration::from_micros(500));
        }
        let took = started.elapsed();
        while !open.is_empty() {
            answered += collect(&mut open)?;
            // The last answers are still under way.
            sleep(Duration::from_millis(1));
        }
        Ok((sent, answered, took))
    })
}

/// Sends the request of this number, from an address and port that no other one uses.
fn question(number: u64, to: SocketAddr) -> Result<UdpSocket> {
    let (round, address) = (number / u64::from(ADDRESSES), (number % u64::from(ADDRESSES)) as u32);
    let from: Ipv4Addr = later(SENDERS, 1 + address);
    let socket = UdpSocket::bind((from, FIRST_PORT + u16::try_from(round)?))
        .with_context(|| format!("a socket at {from}"))?;
    // The socket receives from its frontend only.
    socket.connect(to)?;
    socket.set_nonblocking(true)?;
    socket.send(&number.to_ne_bytes())?;
    Ok(socket)
}

/// Removes the requests that were answered, and those that have waited for too long, from the list.
/// Returns the number of answered ones.
fn collect(open: &mut VecDeque<(UdpSocket, u64, Instant)>) -> Result<u64> {
    let (mut answered, mut failed) = (0, None);
    open.retain(|(socket, number, sent)| {
        let mut buffer = [0; 64];
        match socket.recv(&mut buffer) {
            Ok(8) if buffer[..8] == number.to_ne_bytes() => {
                answered += 1;
                false
            }
            Ok(_) => {
                failed = Some(anyhow::anyhow!("the answer of another question"));
                false
            }
            // An ICMP error is no answer either.
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => false,
            Err(_) => sent.elapsed() < PATIENCE,
        }
    });
    failed.map_or(Ok(answered), Err)
}

/// Raises the limit of open files: the socket of an unanswered request stays open for seconds.
fn raise_limit_of_files() -> Result<()> {
    // SAFETY: the structure outlives both calls.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        ensure!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0, "reading the limit of files");
        limit.rlim_cur = limit.rlim_max;
        ensure!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) == 0, "raising the limit of files");
    }
    Ok(())
}
