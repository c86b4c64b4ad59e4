//! The programs outlive the agent, are replaced without a gap, and are removed only on request.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::attached::socket_programs;
use traffic_policy_testing::cgroup::Cgroup;
use traffic_policy_testing::lab::Lab;

use crate::fixture::{SocketCluster, service, service_at};
use traffic_policy_tests::caller::{Caller, Kind};

fn fixture() -> SocketCluster {
    SocketCluster::start(&[1, 1], |cluster| {
        cluster.manifests.apply(&service(10), &cluster.backends()).unwrap();
    })
}

/// The number of pinned links to cgroups.
fn links(pins: &Path) -> usize {
    let version = fs::read_dir(pins).unwrap().next().unwrap().unwrap().path();
    let names = fs::read_dir(version.join("links")).unwrap();
    names.filter(|name| name.as_ref().unwrap().file_name().to_str().unwrap().starts_with("cgroup-")).count()
}

#[test]
fn killed_started_again_and_cleaned_up() {
    let mut fixture = fixture();
    let cgroup = fixture.cgroups(1).node.path().to_owned();
    let first = socket_programs(&cgroup).unwrap();
    assert!(first.iter().all(|programs| programs.len() == 1), "{first:?}");
    let caller = fixture.in_pod(1, 1);
    let datagrams = caller.udp(Kind::V6);
    let to = service_at(10, Kind::V6);
    let pod = datagrams.exchange(to).unwrap().1.pod;

    fixture.cluster.agents[0].kill().unwrap();
    for kind in Kind::ALL {
        caller.ask(kind, service_at(10, kind)).unwrap();
    }
    assert_eq!(socket_programs(&cgroup).unwrap(), first);

    // The agent is restarted five times, while a process connects without a pause.
    let (namespace, pods) = (fixture.cluster.lab.node(1).pod(1).netns(), &fixture.cgroups(1).pods);
    let stop = AtomicBool::new(false);
    let (calls, mut agent) = thread::scope(|scope| {
        let load = scope.spawn(|| {
            let caller = Caller::start(env!("CARGO_BIN_EXE_caller"), namespace, pods);
            let mut calls = 0_u32;
            while !stop.load(Ordering::Relaxed) {
                for kind in Kind::ALL {
                    let (_, socket) = caller.ask(kind, service_at(10, kind)).unwrap();
                    assert_eq!(socket.peer().unwrap(), kind.written(service_at(10, kind)));
                    calls += 1;
                }
            }
            calls
        });
        // A panic of this thread must not leave the other one running.
        let restart = || -> anyhow::Result<Agent> {
            let cluster = &fixture.cluster;
            let builder = || {
                Agent::builder(&cluster.lab, cluster.lab.node(1))
                    .cgroup(fixture.cgroups(1).node.path())
                    .flags(&["--service-cidr", "10.96.0.0/16,fd00:10:96::/112"])
            };
            let mut agent = builder().start()?;
            agent.wait_ready(Duration::from_secs(20))?;
            for _ in 0..4 {
                agent.kill()?;
                agent.start_again()?;
                agent.wait_ready(Duration::from_secs(20))?;
            }
            Ok(agent)
        };
        let agent = restart();
        stop.store(true, Ordering::Relaxed);
        (load.join().unwrap(), agent.unwrap())
    });
    assert!(calls > 100, "{calls}");
    let last = socket_programs(&cgroup).unwrap();
    assert!(last.iter().all(|programs| programs.len() == 1), "{last:?}");
    assert!(first.iter().zip(&last).all(|(old, new)| old != new), "a program was not replaced");
    assert_eq!(links(agent.pin_dir()), 10);
    // The table of sockets is the same.
    assert_eq!(datagrams.exchange(to).unwrap().1.pod, pod);

    agent.stop().unwrap();
    assert_eq!(socket_programs(&cgroup).unwrap(), last);
    let before = caller.ask(Kind::V4, service_at(10, Kind::V4)).unwrap();
    assert_eq!(before.1.peer().unwrap(), service_at(10, Kind::V4));
    assert!(agent.command(&["cleanup"]).unwrap().status.success());
    assert!(socket_programs(&cgroup).unwrap().iter().all(Vec::is_empty));
    caller.ask(Kind::V4, service_at(10, Kind::V4)).unwrap_err();
}

#[test]
fn another_cgroup_and_none() {
    let mut fixture = fixture();
    let cgroup = fixture.cgroups(1).node.path().to_owned();
    fixture.cluster.agents[0].stop().unwrap();
    let other = Cgroup::create(&format!("{}-other", fixture.cluster.lab.id())).unwrap();
    let builder = || Agent::builder(&fixture.cluster.lab, fixture.cluster.lab.node(1));
    let mut agent = builder().cgroup(other.path()).start().unwrap();
    agent.wait_ready(Duration::from_secs(20)).unwrap();
    // The old cgroup's programs are detached once the new ones are attached.
    assert!(socket_programs(&cgroup).unwrap().iter().all(Vec::is_empty));
    assert!(socket_programs(other.path()).unwrap().iter().all(|programs| programs.len() == 1));
    assert_eq!(links(agent.pin_dir()), 10);

    // The cgroup is made anew under its name while no agent ran.
    agent.kill().unwrap();
    let name = other.path().to_owned();
    fs::remove_dir(&name).unwrap();
    fs::create_dir(&name).unwrap();
    agent.start_again().unwrap();
    agent.wait_ready(Duration::from_secs(20)).unwrap();
    assert!(socket_programs(&name).unwrap().iter().all(|programs| programs.len() == 1));
    assert_eq!(links(agent.pin_dir()), 10);

    agent.stop().unwrap();
    let agent = builder().start().unwrap();
    agent.wait_ready(Duration::from_secs(20)).unwrap();
    assert!(socket_programs(&name).unwrap().iter().all(Vec::is_empty));
    assert_eq!(links(agent.pin_dir()), 0);
}

#[test]
fn a_failed_start_leaves_nothing() {
    let lab = Lab::builder().pods(&[0]).build().unwrap();
    let cgroup = Cgroup::create(&format!("{}-failed", lab.id())).unwrap();
    let builder = || Agent::builder(&lab, lab.node(1));
    for (agent, texts) in [
        (
            builder().cgroup(Path::new("/proc")),
            ["/proc is no cgroup2 folder", "/proc/self/mountinfo", "--cgroup none"],
        ),
        (builder().cgroup(Path::new("/nowhere")), ["--cgroup", "/nowhere cannot be read", "No such file"]),
        // The programs are attached already when the fault is found.
        (builder().cgroup(cgroup.path()).kubeconfig(Path::new("/nowhere")), ["/nowhere", "", ""]),
    ] {
        let mut agent = agent.start().unwrap();
        assert_eq!(agent.wait_ended(Duration::from_secs(20)).unwrap(), Some(1));
        agent.wait_said(&texts, Duration::from_secs(1)).unwrap();
        assert!(socket_programs(cgroup.path()).unwrap().iter().all(Vec::is_empty));
        assert!(!agent.pin_dir().exists());
    }
}
