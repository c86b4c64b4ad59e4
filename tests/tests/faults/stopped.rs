//! An agent that is stopped for moments while it starts, as a debugger or a freezer of containers
//! does it: the verifier gives up whatever it is at.

use std::fs;
use std::thread::sleep;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::Lab;

/// The number of starts. One of sixty to eighty is stopped at the moment that matters.
const STARTS: usize = 10;
/// The time that it stands still, and the time that it runs until the next stop.
const MOMENT: Duration = Duration::from_micros(100);

#[test]
fn while_it_asks_the_kernel_what_it_can_do() {
    let cluster = Cluster::start(Lab::builder().pods(&[0])).unwrap();
    let maps = cluster.lab.bpffs().join("node-1").join("v14/maps");
    for _ in 0..STARTS {
        let mut agent = Agent::builder(&cluster.lab, cluster.lab.node(1)).start().unwrap();
        let process = Pid::from_raw(agent.pid().unwrap().try_into().unwrap());
        // It makes maps once it has asked, and before it loads a program.
        let has_maps = || fs::read_dir(&maps).is_ok_and(|mut maps| maps.next().is_some());
        while !has_maps() && agent.is_running() {
            for signal in [Signal::SIGSTOP, Signal::SIGCONT] {
                kill(process, signal).unwrap();
                sleep(MOMENT);
            }
        }
        agent.wait_ready(Duration::from_secs(60)).unwrap();
        agent.kill().unwrap();
        assert!(agent.command(&["cleanup"]).unwrap().status.success());
    }
}
