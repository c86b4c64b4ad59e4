//! UDP sockets connected to removed endpoints are destroyed, in every network namespace of a
//! cgroup.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{fs, thread};

use nix::libc;
use socket2::{Domain, Protocol, Socket, Type};
use traffic_policy_dataplane::node::sockets::{Destroyed, destroy_udp, supported};
use traffic_policy_testing::cgroup::Cgroup;
use traffic_policy_testing::netns::{Namespace, Owned, Process};
use traffic_policy_testing::pace::scaled;

const GONE: &str = "192.0.2.53:53";
const GONE6: &str = "[2001:db8::53]:53";
const SERVES: &str = "192.0.2.54:53";

/// A namespace that has routes to all of these.
fn network(name: &str) -> Owned {
    let namespace = Namespace::create(&format!("{name}-{}", std::process::id())).unwrap();
    namespace
        .netlink(async |net| {
            net.up("lo").await?;
            net.address("lo", "192.0.2.1".parse()?, 24).await?;
            net.address("lo", "2001:db8::1".parse()?, 64).await
        })
        .unwrap();
    namespace
}

/// A process in the namespace: a namespace is found by its processes.
fn inhabitant(namespace: &Namespace, cgroup: &Cgroup) -> Process {
    let mut command = Command::new("sleep");
    command.arg("600");
    let process = namespace.spawn(command).unwrap();
    cgroup.add(process.id()).unwrap();
    process
}

fn connect(namespace: &Namespace, to: &str) -> Socket {
    let to: SocketAddr = to.parse().unwrap();
    namespace.run(|| {
        let socket = Socket::new(Domain::for_address(to), Type::DGRAM, Some(Protocol::UDP)).unwrap();
        socket.connect(&to.into()).unwrap();
        socket.set_read_timeout(Some(scaled(Duration::from_secs(20)))).unwrap();
        socket
    })
}

/// The error of a call that would wait for a datagram.
fn state(socket: &Socket) -> std::io::Error {
    socket.set_nonblocking(true).unwrap();
    socket.recv(&mut [MaybeUninit::uninit(); 16]).unwrap_err()
}

fn is_aborted(socket: &Socket) -> bool {
    state(socket).raw_os_error() == Some(libc::ECONNABORTED)
}

fn is_untouched(socket: &Socket) -> bool {
    state(socket).kind() == ErrorKind::WouldBlock && socket.peer_addr().is_ok()
}

fn named<const N: usize>(sockets: [(&Socket, &str); N]) -> BTreeMap<u64, SocketAddr> {
    sockets.map(|(socket, peer)| (socket.cookie().unwrap(), peer.parse().unwrap())).into()
}

#[test]
fn named_sockets_are_destroyed_and_no_others() {
    assert!(supported());
    let (one, two, elsewhere) = (network("tp-sock-one"), network("tp-sock-two"), network("tp-sock-else"));
    let cgroup = Cgroup::create("tp-sock").unwrap();
    let below = cgroup.below("pod").unwrap();
    let _inhabitants = [inhabitant(&one, &cgroup), inhabitant(&one, &below), inhabitant(&two, &below)];

    let gone = connect(&one, GONE);
    let unnamed = connect(&one, GONE);
    let moved_on = connect(&one, SERVES);
    let mapped = connect(&two, "[::ffff:192.0.2.53]:53");
    let gone6 = connect(&two, GONE6);
    let not_in_the_cgroup = connect(&elsewhere, GONE);
    let closed = named([(&connect(&one, GONE), GONE)]);
    let mut cookies = named([
        (&gone, GONE),
        (&moved_on, GONE),
        (&mapped, GONE),
        (&gone6, GONE6),
        (&not_in_the_cgroup, GONE),
    ]);
    cookies.extend(closed);

    let own = || fs::read_link("/proc/thread-self/ns/net").unwrap();
    let before = own();
    let waiting = gone.try_clone().unwrap();
    let destroyed = thread::scope(|scope| {
        // A call that waits in the kernel is woken.
        let woken = scope.spawn(|| waiting.recv(&mut [MaybeUninit::uninit(); 16]).unwrap_err());
        thread::sleep(Duration::from_millis(100));
        let destroyed = destroy_udp(cgroup.path(), &cookies).unwrap();
        assert_eq!(woken.join().unwrap().raw_os_error(), Some(libc::ECONNABORTED));
        destroyed
    });
    assert_eq!(own(), before, "the calling thread went elsewhere");

    let expected = [&gone, &mapped, &gone6].map(|socket| socket.cookie().unwrap());
    assert_eq!(
        destroyed,
        Destroyed { cookies: BTreeSet::from(expected), namespaces: 2, failures: Vec::new() }
    );
    // The error of `gone` was returned to the call that it woke.
    assert!(gone.peer_addr().is_err());
    assert!(is_aborted(&mapped) && is_aborted(&gone6));
    for socket in [&unnamed, &moved_on, &not_in_the_cgroup] {
        assert!(is_untouched(socket), "{:?}", socket.peer_addr());
    }
    // Another connect() is all that is needed.
    gone.connect(&SERVES.parse::<SocketAddr>().unwrap().into()).unwrap();
    assert!(is_untouched(&gone));
    // A repeated search destroys nothing.
    let again = destroy_udp(cgroup.path(), &cookies).unwrap();
    assert_eq!(again, Destroyed { namespaces: 2, ..Destroyed::default() });
}

#[test]
fn processes_that_end_meanwhile_are_no_failure() {
    let namespace = network("tp-sock-end");
    let cgroup = Cgroup::create("tp-sock-end").unwrap();
    let cookies = named([(&connect(&namespace, GONE), GONE)]);
    let mut last = inhabitant(&namespace, &cgroup);
    let looked = || destroy_udp(cgroup.path(), &cookies).unwrap();
    assert_eq!(looked(), Destroyed { namespaces: 1, ..Destroyed::default() });
    // The process is dead, and not reaped yet.
    last.signal(nix::sys::signal::Signal::SIGKILL).unwrap();
    for _ in 0..20 {
        assert_eq!(looked().failures, [""; 0]);
    }
    last.wait().unwrap();
    assert_eq!(looked(), Destroyed::default());

    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let mut process = namespace.spawn(Command::new("true")).unwrap();
                // The process may have exited already.
                cgroup.add(process.id()).ok();
                process.wait().unwrap();
            }
        });
        // The flag is set even if an assertion fails: the scope waits for its threads.
        scopeguard::defer! { stop.store(true, Ordering::Relaxed) };
        let mut seen = 0;
        for _ in 0..2000 {
            let destroyed = looked();
            assert_eq!(destroyed.failures, [""; 0]);
            seen += destroyed.namespaces;
        }
        assert!(seen > 0, "no process was met");
    });
}
