//! Refused starts: exit code 1, a message that names the cause and the fix, and the node left as it
//! was.

use std::fs;
use std::path::Path;
use std::time::Duration;

use traffic_policy_testing::agent::{Agent, AgentBuilder};
use traffic_policy_testing::attached::Attached;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::traffic::Outcome;
use traffic_policy_testing::xdp::Always;

use crate::privileges::limited;

const PORT: u16 = 30080;
const SOON: Duration = Duration::from_secs(20);

/// A node with one pod, and a Service that would work.
fn one_node() -> Cluster {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    cluster.manifests.apply(&Cluster::node_port("web", Policy::Cluster, PORT), &cluster.backends()).unwrap();
    cluster
}

fn builder(cluster: &Cluster) -> AgentBuilder {
    Agent::builder(&cluster.lab, cluster.lab.node(1))
}

/// Starts the agent, and expects that it exits with a message that contains all of `texts`.
fn refused(agent: AgentBuilder, texts: &[&str]) {
    let mut agent = agent.start().unwrap();
    let code = agent.wait_ended(SOON).unwrap();
    let log = agent.log();
    assert_eq!(code, Some(1), "{log}");
    // Earlier starts on the same node have written to the log, too.
    let message = log.lines().rfind(|line| line.starts_with("traffic-policy-agent: ")).unwrap_or_default();
    for text in texts {
        assert!(message.contains(text), "no {text:?} in {message:?}\n{log}");
    }
}

fn is_untouched(cluster: &Cluster, pin_dir: &Path) {
    let attached = cluster.lab.node(1).netns().attached("eth0").unwrap();
    assert_eq!(attached, Attached::default());
    assert!(!pin_dir.exists(), "{} is left", pin_dir.display());
}

fn answered(cluster: &Cluster) {
    for protocol in Protocol::BOTH {
        cluster.answer(protocol, cluster.at(1, Family::V4, PORT)).unwrap();
    }
}

/// Stops an agent, and removes what it leaves on the node.
fn leaves(agent: &mut Agent) {
    agent.stop().unwrap();
    assert!(agent.command(&["cleanup"]).unwrap().status.success());
}

/// Starts that are refused on a node that no agent serves yet.
#[test]
fn refused_as_the_first_agent_of_a_node() {
    let cluster = one_node();
    an_unknown_device(&cluster);
    missing_privileges(&cluster);
    no_bpf_file_system(&cluster);
    too_few_source_ports(&cluster);
    a_taken_healthz_port(&cluster);
    pins_of_another_layout(&cluster);
}

/// Agents that follow each other on one node, and starts that are refused there.
#[test]
fn refused_beside_another_agent_or_its_programs_and_modes_that_replace_each_other() {
    let cluster = one_node();
    let first = another_xdp_program(&cluster);
    cluster.lab.node(1).netns().detach_xdp("eth0").unwrap();
    another_agents_device(&cluster, first);
    another_mode_than_before(&cluster);
    a_refused_successor_leaves_what_it_found(&cluster);
    cluster.lab.node(1).netns().detach_xdp("eth0").unwrap();
    the_own_device_by_another_name_of_the_pins(&cluster);
}

fn an_unknown_device(cluster: &Cluster) {
    let pins = cluster.lab.bpffs().join("node-1");
    refused(
        builder(cluster).devices(&["eth0", "eth7"]),
        &["there is no device eth7", "lo, ", "eth0", "cni0"],
    );
    is_untouched(cluster, &pins);
    refused(
        builder(cluster).devices(&["lo"]),
        &[
            "packets of device lo (type loopback) begin neither with an Ethernet nor with an IP header",
            "leave it out",
        ],
    );
    is_untouched(cluster, &pins);
}

fn missing_privileges(cluster: &Cluster) {
    let pins = cluster.lab.bpffs().join("node-1");
    for (dropped, named) in [
        ("-bpf,-perfmon,-net_admin,-sys_admin", &["CAP_BPF", "CAP_PERFMON", "CAP_NET_ADMIN"][..]),
        ("-net_admin", &["CAP_NET_ADMIN"]),
        ("-bpf,-sys_admin", &["CAP_BPF"]),
    ] {
        refused(
            builder(cluster).program(&limited(cluster, dropped)),
            &["missing privileges", "securityContext.capabilities.add"],
        );
        let log = fs::read_to_string(cluster.lab.logs().join("node-1.log")).unwrap();
        let message = log.lines().next_back().unwrap();
        for capability in ["CAP_BPF", "CAP_PERFMON", "CAP_NET_ADMIN"] {
            assert_eq!(message.contains(capability), named.contains(&capability), "{dropped}: {message}");
        }
        is_untouched(cluster, &pins);
    }
}

fn no_bpf_file_system(cluster: &Cluster) {
    let pins = cluster.lab.logs().join("deep").join("pins");
    refused(builder(cluster).pin_dir(&pins), &["is not on a BPF file system", "mount -t bpf", "--pin-dir"]);
    is_untouched(cluster, &pins);
    assert!(!pins.parent().unwrap().exists());
}

/// Returns an agent that serves by TC.
fn another_xdp_program(cluster: &Cluster) -> Agent {
    let (node, pins) = (cluster.lab.node(1), cluster.lab.bpffs().join("node-1"));
    node.netns().attach_xdp("eth0", Always::Pass).unwrap();
    for mode in ["xdp", "xdp-generic"] {
        refused(builder(cluster).attach(mode), &["another XDP program is on eth0", "--attach tc"]);
        let attached = node.netns().attached("eth0").unwrap();
        assert_eq!(attached, Attached { xdp: true, ingress: 0, egress: 0 }, "{mode}");
        assert!(!pins.exists(), "{mode}");
    }
    // With `auto` a veth is served by TC anyway, and the other program stays attached.
    let agent = builder(cluster).attach("auto").start().unwrap();
    agent.wait_ready(SOON).unwrap();
    let attached = node.netns().attached("eth0").unwrap();
    assert_eq!(attached, Attached { xdp: true, ingress: 1, egress: 1 });
    answered(cluster);
    agent
}

/// The second device cannot have XDP; the first has its program already by then, and is restored.
#[test]
fn a_device_without_xdp() {
    let cluster = Cluster::start(Lab::builder().pods(&[1]).overlay()).unwrap();
    let texts = ["the driver of flannel.1 (vxlan) has no XDP", "--attach tc", "--attach xdp-generic"];
    refused(builder(&cluster).attach("xdp").devices(&["eth0", "flannel.1"]), &texts);
    is_untouched(&cluster, &cluster.lab.bpffs().join("node-1"));
    assert_eq!(cluster.lab.node(1).netns().attached("flannel.1").unwrap(), Attached::default());
}

/// The start of an agent that is to take over from one that served by TC, but cannot.
fn a_refused_successor_leaves_what_it_found(cluster: &Cluster) {
    let node = cluster.lab.node(1);
    node.netns().attach_xdp("eth0", Always::Pass).unwrap();
    refused(builder(cluster).attach("xdp"), &["another XDP program is on eth0"]);
    let attached = node.netns().attached("eth0").unwrap();
    assert_eq!(attached, Attached { xdp: true, ingress: 1, egress: 1 });
    answered(cluster);
}

/// Each mode replaces the other; the programs at TC stay throughout.
fn another_mode_than_before(cluster: &Cluster) {
    for (number, mode) in ["xdp", "xdp-generic", "tc", "xdp-generic", "xdp", "tc"].into_iter().enumerate() {
        let mut agent = builder(cluster).attach(mode).start().unwrap();
        agent.wait_ready(SOON).unwrap();
        let attached = cluster.lab.node(1).netns().attached("eth0").unwrap();
        assert_eq!(attached, Attached { xdp: mode != "tc", ingress: 1, egress: 1 }, "{mode}");
        answered(cluster);
        if number == 0 {
            a_second_agent(cluster, &agent);
        }
        agent.stop().unwrap();
    }
}

fn pins_of_another_layout(cluster: &Cluster) {
    let pins = cluster.lab.bpffs().join("node-1");
    fs::create_dir_all(pins.join("v999").join("maps")).unwrap();
    let texts =
        ["holds pins of layout v999", "--on-other-layout replace", "traffic-policy-agent cleanup --pin-dir"];
    refused(builder(cluster).flags(&["--on-other-layout", "refuse"]), &texts);
    assert_eq!(cluster.lab.node(1).netns().attached("eth0").unwrap(), Attached::default());
    let left: Vec<_> = fs::read_dir(&pins).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["v999"]);
    // The advice of the message helps.
    let mut ended = builder(cluster).devices(&["eth7"]).start().unwrap();
    ended.wait_ended(SOON).unwrap();
    assert!(ended.command(&["cleanup"]).unwrap().status.success());
    without_cap_sys_admin(cluster);
}

/// Capabilities that `check` calls optional are not needed.
fn without_cap_sys_admin(cluster: &Cluster) {
    let agent = builder(cluster).program(&limited(cluster, "-sys_admin")).start().unwrap();
    agent.wait_ready(Duration::from_secs(15)).unwrap();
    answered(cluster);
}

fn a_second_agent(cluster: &Cluster, first: &Agent) {
    let texts = ["another traffic-policy-agent is using", "node-1", "--pin-dir"];
    refused(builder(cluster).flags(&["--healthz-address", "127.0.0.1:10999"]), &texts);
    // If all flags are equal, the port is the first conflict.
    refused(builder(cluster), &["10256", "cannot be listened on", "--healthz-address"]);
    assert!(first.is_running());
    assert_eq!(first.healthz().unwrap().status, 200);
    answered(cluster);
}

fn a_taken_healthz_port(cluster: &Cluster) {
    let _taken = cluster.lab.node(1).netns().run(|| std::net::TcpListener::bind("0.0.0.0:10256").unwrap());
    refused(builder(cluster), &["10256", "cannot be listened on", "--healthz-address"]);
    is_untouched(cluster, &cluster.lab.bpffs().join("node-1"));
    let mut agent = builder(cluster).flags(&["--healthz-address", "127.0.0.1:10999"]).start().unwrap();
    agent.wait_said(&["first sync"], SOON).unwrap();
    answered(cluster);
    leaves(&mut agent);
}

fn too_few_source_ports(cluster: &Cluster) {
    let texts =
        ["only 100 ports are left", "4096 are needed", "net.ipv4.ip_local_port_range", "--snat-ports"];
    refused(builder(cluster).flags(&["--snat-ports", "20000-20099"]), &texts);
    is_untouched(cluster, &cluster.lab.bpffs().join("node-1"));
}

/// Two agents, each with pins of its own, on one device: each packet would be handled twice.
fn another_agents_device(cluster: &Cluster, mut first: Agent) {
    let other = cluster.lab.bpffs().join("another");
    let flags = ["--healthz-address", "127.0.0.1:10999", "--metrics-address", "none"];
    let texts = ["another traffic-policy-agent are on eth0", "bpffs/node-1", "cleanup --pin-dir"];
    let untouched = || {
        let attached = cluster.lab.node(1).netns().attached("eth0").unwrap();
        assert_eq!(attached, Attached { xdp: false, ingress: 1, egress: 1 });
        assert!(!other.exists(), "{} is left", other.display());
    };
    for mode in ["tc", "xdp"] {
        refused(builder(cluster).pin_dir(&other).attach(mode).flags(&flags), &texts);
        untouched();
    }
    // The programs stay after the agent has exited, and so does the conflict.
    first.stop().unwrap();
    refused(builder(cluster).pin_dir(&other).flags(&flags), &texts);
    untouched();
    // The advice of the message helps.
    assert!(first.command(&["cleanup"]).unwrap().status.success());
    let mut second = builder(cluster).pin_dir(&other).flags(&flags).start().unwrap();
    let is_answered = |outcome: &Outcome| matches!(outcome, Outcome::Answered(_));
    cluster.wait_for(Protocol::Tcp, cluster.at(1, Family::V4, PORT), SOON, is_answered).unwrap();
    leaves(&mut second);
}

/// The pins of an earlier agent, which served by TC, are not those of another agent, whatever the
/// name of the folder.
fn the_own_device_by_another_name_of_the_pins(cluster: &Cluster) {
    let beside = cluster.lab.bpffs().join("beside");
    fs::create_dir(&beside).unwrap();
    let second = builder(cluster).attach("tc").pin_dir(&beside.join("../node-1")).start().unwrap();
    second.wait_ready(SOON).unwrap();
    answered(cluster);
}

/// The agent, as process 1 of a container, would not receive the signal without a handler, and be
/// killed half a minute later.
#[test]
fn sigterm_during_the_start_is_heard() {
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;
    let cluster = one_node();
    let mut agent = builder(&cluster).attach("xdp").start().unwrap();
    // The agent listens before it loads anything, and loading takes most of the start.
    agent.wait_said(&["answering /healthz"], SOON).unwrap();
    kill(Pid::from_raw(agent.pid().unwrap() as i32), Signal::SIGTERM).unwrap();
    assert_eq!(agent.wait_ended(SOON).unwrap(), Some(0), "{}", agent.log());
    assert!(agent.log().contains("the node is as it was"), "{}", agent.log());
    is_untouched(&cluster, &cluster.lab.bpffs().join("node-1"));
}
