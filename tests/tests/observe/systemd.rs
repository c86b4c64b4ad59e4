//! Notifications to systemd by a real agent, and its unit: the sandbox of the unit suffices.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::ptrace;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use traffic_policy_testing::agent::{self, Agent};
use traffic_policy_testing::cgroup::Cgroup;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::pace::{self, scaled};

const PORT: u16 = 30080;
const SOON: Duration = Duration::from_secs(30);
const UNIT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/systemd/traffic-policy-agent.service");

/// The other end of NOTIFY_SOCKET.
struct Manager(UnixDatagram);

impl Manager {
    fn listen(path: &Path) -> Self {
        let socket = UnixDatagram::bind(path).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        Self(socket)
    }

    fn next(&self) -> Option<String> {
        let mut bytes = [0; 4096];
        match self.0.recv(&mut bytes) {
            Ok(length) => Some(String::from_utf8_lossy(&bytes[..length]).into_owned()),
            Err(error) if [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind()) => None,
            Err(error) => panic!("{error}"),
        }
    }

    /// Waits for a message with this prefix. Returns it with those that came before.
    fn until(&self, begin: &str, agent: &Agent) -> Vec<String> {
        let (start, limit) = (Instant::now(), scaled(SOON));
        let mut heard = Vec::new();
        while start.elapsed() < limit {
            heard.extend(self.next());
            if heard.last().is_some_and(|message: &String| message.starts_with(begin)) {
                return heard;
            }
        }
        panic!("no {begin} within {limit:?}: {heard:?}\n{}", agent.log());
    }

    /// Discards all pending messages.
    fn drain(&self) {
        while self.next().is_some() {}
    }
}

fn cluster() -> Cluster {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    cluster.manifests.apply(&Cluster::node_port("web", Policy::Cluster, PORT), &cluster.backends()).unwrap();
    cluster
}

#[test]
fn ready_alive_standing_still_reloading_stopping() {
    let cluster = cluster();
    let manager = Manager::listen(&cluster.lab.logs().join("notify"));
    // A folder that cannot be read completely is not a valid state: the maps are not filled.
    let broken = cluster.lab.manifests().join("broken.yaml");
    fs::write(&broken, "kind: [").unwrap();
    let agent = Agent::builder(&cluster.lab, cluster.lab.node(1))
        .environment("NOTIFY_SOCKET", cluster.lab.logs().join("notify").to_str().unwrap())
        .environment("WATCHDOG_USEC", "1000000")
        .start()
        .unwrap();
    let before = manager.until("STATUS=", &agent);
    assert!(before.last().unwrap().contains("broken.yaml"), "{before:?}");
    let signs = |heard: &[String]| heard.iter().filter(|message| *message == "WATCHDOG=1").count();
    assert!(signs(&before) > 0 && !before.contains(&"READY=1".to_owned()), "{before:?}");
    fs::remove_file(&broken).unwrap();
    let heard = manager.until("READY=1", &agent);
    cluster.answer(Protocol::Tcp, cluster.at(1, Family::V4, PORT)).unwrap();
    assert!(agent.log().contains("first sync"), "{heard:?} {}", agent.log());
    manager.until("STATUS=the maps are in sync", &agent);
    (0..3).for_each(|_| drop(manager.until("WATCHDOG=1", &agent)));
    no_sign_of_life_while_the_run_loop_stands_still(&manager, &agent);

    // SIGHUP
    let own = Pid::from_raw(agent.pid().unwrap() as i32);
    kill(own, Signal::SIGHUP).unwrap();
    manager.until("RELOADING=1\nMONOTONIC_USEC=", &agent);
    manager.until("READY=1", &agent);
    kill(own, Signal::SIGTERM).unwrap();
    manager.until("STOPPING=1", &agent);
}

/// The run loop is on the main thread; all others go on.
fn no_sign_of_life_while_the_run_loop_stands_still(manager: &Manager, agent: &Agent) {
    let main = Pid::from_raw(agent.pid().unwrap() as i32);
    // The thread is stopped where it waits: elsewhere it may hold a lock that the answer below
    // needs.
    let stat = format!("/proc/{main}/task/{main}/stat");
    pace::until("a run loop that waits", SOON, || {
        fs::read_to_string(&stat).unwrap().rsplit_once(") ").unwrap().1.starts_with('S')
    });
    // A signal would stop the whole process; a tracer stops one thread.
    ptrace::seize(main, ptrace::Options::empty()).unwrap();
    ptrace::interrupt(main).unwrap();
    let stopped = waitpid(main, Some(WaitPidFlag::__WALL)).unwrap();
    assert!(matches!(stopped, WaitStatus::PtraceEvent(..) | WaitStatus::Stopped(..)), "{stopped:?}");
    manager.drain();
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(4) {
        assert_eq!(manager.next(), None, "the loop stands still");
    }
    assert_eq!(agent.livez().unwrap().status, 200, "other threads answer, and a minute is not over");
    ptrace::detach(main, None).unwrap();
    manager.until("WATCHDOG=1", agent);
}

/// The values of a key of the unit, in the order of its lines.
fn unit(key: &str) -> Vec<String> {
    let unit = fs::read_to_string(UNIT).unwrap();
    let values = unit.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    values.map(str::to_owned).collect()
}

#[test]
fn the_unit_is_one_that_systemd_takes() {
    let folder = tempfile::tempdir().unwrap();
    let program = agent::program().unwrap();
    let text = fs::read_to_string(UNIT).unwrap();
    assert_eq!(unit("ExecStart"), ["/usr/local/bin/traffic-policy-agent run"]);
    let copy = folder.path().join("traffic-policy-agent.service");
    fs::write(&copy, text.replace("/usr/local/bin/traffic-policy-agent", program.to_str().unwrap())).unwrap();
    let verify = |path: &Path| {
        Command::new("systemd-analyze")
            .args(["verify", "--man=no", "--recursive-errors=no"])
            .arg(path)
            .output()
    };
    let output = match verify(&copy) {
        Ok(output) => output,
        Err(error) => {
            let why = format!("no systemd-analyze here: {error}");
            traffic_policy_testing::skipped("the_unit_is_one_that_systemd_takes", why);
            return;
        }
    };
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(!said.contains("traffic-policy-agent.service"), "{said}");
}

/// The unit's capabilities, `no_new_privs` and read-only file systems, without systemd.
#[test]
fn the_sandbox_of_the_unit_is_enough() {
    let cluster = cluster();
    let cgroup = Cgroup::create("systemd").unwrap();
    for (key, value) in [
        ("Type", "notify"),
        ("ProtectSystem", "strict"),
        ("ReadOnlyPaths", "/sys /proc/sys /proc/irq /proc/bus /proc/fs /proc/sysrq-trigger"),
        ("ProtectControlGroups", "yes"),
        ("ReadWritePaths", "/sys/fs/bpf"),
        ("NoNewPrivileges", "yes"),
    ] {
        assert_eq!(unit(key), [value], "{key}");
    }
    let bounding: Vec<_> = unit("CapabilityBoundingSet")[0]
        .split(' ')
        .map(|name| format!(",+{}", name.trim_start_matches("CAP_").to_lowercase()))
        .collect();
    let program = agent::program().unwrap();
    let script = cluster.lab.logs().join("sandbox");
    // The mounts of ProtectSystem=strict, ReadOnlyPaths= and ProtectControlGroups=; the lab's BPF
    // file system is separate, as ReadWritePaths= leaves it.
    let text = format!(
        "#!/bin/sh\nset -e\nif [ -z \"$TP_INSIDE\" ]; then TP_INSIDE=1 exec unshare --mount --propagation private \"$0\" \"$@\"; fi\n\
         mount --bind /proc/sys /proc/sys\n\
         for at in / /sys /sys/fs/cgroup /proc/sys; do mountpoint -q $at && mount -o remount,bind,ro $at; done\n\
         if touch /traffic-policy-test 2>/dev/null; then echo not read-only; exit 9; fi\n\
         exec setpriv --no-new-privs --bounding-set=-all{} {} \"$@\"\n",
        bounding.concat(),
        program.display()
    );
    fs::write(&script, text).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let mut agent = Agent::builder(&cluster.lab, cluster.lab.node(1))
        .program(&script)
        .cgroup(cgroup.path())
        .start()
        .unwrap();
    agent.wait_ready(SOON).unwrap();
    for family in Family::BOTH {
        cluster.answer(Protocol::Tcp, cluster.at(1, family, PORT)).unwrap();
    }
    let log = agent.log();
    assert!(!log.contains("WARN") && !log.contains("ERROR"), "{log}");
    agent.stop().unwrap();
}
