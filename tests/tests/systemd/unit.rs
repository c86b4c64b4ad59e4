//! Start, watchdog, reload, refusals and stop, as the unit configures them.

use std::fs;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use traffic_policy_testing::cluster::Protocol;
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::pace::until;

use crate::installed::{CLUSTER_IP, Installed, PORT, systemctl};

const SOON: Duration = Duration::from_secs(30);
/// WatchdogSec, and as much again for the restart.
const WATCHDOG: Duration = Duration::from_secs(120);

fn answered(installed: &Installed) {
    let cluster = &installed.cluster;
    for family in Family::BOTH {
        cluster.answer(Protocol::Tcp, cluster.at(1, family, PORT)).unwrap();
    }
}

/// A line of /proc/PID/status.
fn status(pid: u32, key: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    line.unwrap().trim().to_owned()
}

/// CAP_NET_ADMIN, CAP_PERFMON and CAP_BPF by their numbers.
const CAPABILITIES: u64 = 1 << 12 | 1 << 38 | 1 << 39;
/// CAP_SYS_PTRACE and CAP_SYS_ADMIN, which the process that destroys sockets has in place of the
/// latter two.
const TO_END_SOCKETS: u64 = 1 << 19 | 1 << 21;

/// The service in its sandbox handles packets and sockets from the moment at which `systemctl`
/// returns, and even after its end.
#[test]
fn started_means_served() {
    let Some(installed) = Installed::new("started_means_served", &[]) else { return };
    installed.start();
    answered(&installed);
    assert!(installed.connects(CLUSTER_IP));
    assert_eq!(installed.property("ActiveState"), "active");
    assert_eq!(installed.property("NRestarts"), "0");
    let said = installed.wait("StatusText", SOON, |text| text.contains("in sync"));
    assert_eq!(said, "the maps are in sync");
    let pid = installed.pid();
    // Without CAP_SETPCAP the bounding set stays.
    for (set, wanted) in
        [("CapBnd", CAPABILITIES | TO_END_SOCKETS), ("CapPrm", CAPABILITIES), ("CapEff", CAPABILITIES)]
    {
        let own = u64::from_str_radix(&status(pid, set), 16).unwrap();
        assert_eq!(own, wanted, "{set}");
    }
    assert_eq!((status(pid, "NoNewPrivs"), status(pid, "Seccomp")), ("1".to_owned(), "2".to_owned()));
    let log = installed.log();
    assert!(!log.contains("WARN") && !log.contains("ERROR"), "{log}");

    assert!(systemctl(&["stop", "traffic-policy-agent"]).status.success());
    assert_eq!(installed.property("ActiveState"), "inactive");
    assert_eq!(installed.property("Result"), "success");
    answered(&installed);
    assert!(installed.connects(CLUSTER_IP));
}

/// A stopped process is killed by the unit's own watchdog and restarted; packets are served all the
/// while.
#[test]
fn the_watchdog_ends_what_stands_still() {
    let Some(installed) = Installed::new("the_watchdog_ends_what_stands_still", &[]) else { return };
    installed.start();
    assert_eq!(installed.property("WatchdogUSec"), "1min");
    let former = installed.pid();
    kill(Pid::from_raw(former as i32), Signal::SIGSTOP).unwrap();
    until("an end by the watchdog", WATCHDOG, || {
        answered(&installed);
        installed.property("NRestarts") == "1"
    });
    installed.wait("ActiveState", SOON, |state| state == "active");
    assert!(![0, former].contains(&installed.pid()));
    answered(&installed);
    assert_eq!(installed.property("NRestarts"), "1");
}

/// The agent receives `systemctl reload`, and goes on.
#[test]
fn reload_is_heard() {
    let config = "/run/traffic-policy-config.conf";
    let text = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
    fs::write(config, text).unwrap();
    let setting = format!("TRAFFIC_POLICY_CONFIG={config}");
    let Some(installed) = Installed::new("reload_is_heard", &[&setting]) else { return };
    installed.start();
    let pid = installed.pid();
    let before = installed.log().lines().count();
    let output = systemctl(&["reload", "traffic-policy-agent"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    until("a line about the reload", SOON, || installed.log().lines().count() > before);
    let log = installed.log();
    let told: Vec<_> = log.lines().skip(before).collect();
    // Changes of the file are followed without it, so nothing is left to apply.
    assert!(told.iter().any(|line| line.ends_with("SIGHUP: nothing to apply")), "{told:?}");
    assert_eq!((installed.pid(), installed.property("NRestarts")), (pid, "0".to_owned()));
    answered(&installed);
}

/// Wrong usage is permanent; a device that is missing may appear.
#[test]
fn wrong_usage_is_not_tried_again_and_a_missing_device_is() {
    let name = "wrong_usage_is_not_tried_again_and_a_missing_device_is";
    {
        let Some(installed) = Installed::new(name, &["TRAFFIC_POLICY_ATTACH=sideways"]) else { return };
        assert!(!systemctl(&["start", "traffic-policy-agent"]).status.success());
        assert_eq!(installed.property("ActiveState"), "failed");
        assert_eq!((&*installed.property("ExecMainStatus"), &*installed.property("NRestarts")), ("2", "0"));
        assert!(installed.log().contains("sideways"), "{}", installed.log());
    }
    let Some(installed) = Installed::new(name, &["TRAFFIC_POLICY_DEVICE=eth7"]) else { return };
    // Without the flag it would wait until the service is ready.
    assert!(systemctl(&["start", "--no-block", "traffic-policy-agent"]).status.success());
    installed.wait("NRestarts", SOON, |count| count.parse::<u32>().is_ok_and(|count| count > 1));
    assert!(installed.log().contains("eth7"), "{}", installed.log());
    let node = installed.cluster.lab.node(1).netns();
    let mut add = std::process::Command::new("ip");
    add.args(["link", "add", "eth7", "type", "veth", "peer", "name", "eth8"]);
    assert!(node.output(add).unwrap().status.success());
    installed.wait("ActiveState", SOON, |state| state == "active");
}
