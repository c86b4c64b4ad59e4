//! Findings of `check` about devices: offload, programs of others, forwarding.

use std::process::Command;
use std::time::Duration;

use aya::programs::SchedClassifier;
use aya::programs::tc::{NlOptions, TcAttachOptions, TcAttachType, TcHandle, qdisc_add_clsact};
use traffic_policy_dataplane::{self as dataplane, Kernel, MapSizes};
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::Lab;
use traffic_policy_testing::xdp::Always;

use crate::output::{check, check_in, one_node};

#[test]
fn a_veth_with_checksum_offload() {
    let lab = one_node(Lab::builder().wire_offloads(true));
    let off = "ethtool -K eth0 tx off";
    check(&lab, &[]).only("note", "offload", "eth0 is a veth with checksum offload", off);
    let xdp = check(&lab, &["--attach", "xdp"]);
    xdp.has("warning", "offload", "XDP cannot tell", off);
    let other = "its other end (node-1 in another network namespace) has no XDP program";
    xdp.has("warning", "other-end", other, "ip link set node-1 xdpdrv");
    assert_eq!((xdp.complaints().len(), xdp.code), (2, Some(0)), "{xdp:#?}");
    let agent = Agent::builder(&lab, lab.node(1)).attach("xdp").start().unwrap();
    agent.wait_said(&["WARN", other, "ip link set node-1 xdpdrv"], Duration::from_secs(20)).unwrap();
    drop(agent);

    lab.node(1).netns().set_offloads("eth0", false).unwrap();
    lab.router().attach_xdp("node-1", Always::Pass).unwrap();
    check(&lab, &["--attach", "xdp"]).is_well();
}

/// A frame may have several buffers: a veth accepts the programs whatever its MTU and that of its
/// other end, and `check` knows it.
#[test]
fn jumbo_frames_in_xdp() {
    // The ends of a veth without XDP accept any MTU.
    let lab = one_node(Lab::builder());
    let (node, router) = (lab.node(1).netns(), lab.router());
    for (netns, device) in [(node, "eth0"), (router, "node-1")] {
        let mut ip = Command::new("ip");
        ip.args(["link", "set", device, "mtu", "9000"]);
        assert!(netns.output(ip).unwrap().status.success());
    }
    let narrower = "towards pods of this node takes shorter packets than eth0 (9000)";
    check(&lab, &["--attach", "xdp"]).only("note", "mtu", narrower, "the same MTU everywhere");
    let agent = Agent::builder(&lab, lab.node(1)).attach("xdp").start().unwrap();
    agent.wait_ready(Duration::from_secs(20)).unwrap();
    assert!(node.netlink(async |net| net.has_xdp("eth0").await).unwrap());
}

#[test]
fn programs_of_others_and_of_an_agent_that_runs() {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let (lab, node) = (&cluster.lab, cluster.lab.node(1).netns());
    node.attach_xdp("eth0", Always::Pass).unwrap();
    let off = "ip link set eth0 xdp off";
    check(lab, &[]).only("warning", "xdp-program", "is on eth0: it sees packets first", off);
    check(lab, &["--attach", "xdp"]).only(
        "error",
        "xdp-program",
        "two cannot be on one device",
        "--attach tc",
    );
    node.detach_xdp("eth0").unwrap();
    check(lab, &["--attach", "xdp"]).is_well();

    let mut agents = Agent::start_all(lab, |agent| agent.attach("xdp")).unwrap();
    let process = agents[0].pid().unwrap();
    let own = check(lab, &["--attach", "xdp"]);
    own.has("note", "bpffs", "an agent uses", "second `run`");
    own.has("note", "bpffs", &format!("(process {process})"), "second `run`");
    own.has(
        "note",
        "listener",
        &format!("0.0.0.0:10256 (--healthz-address) is taken by traffic-policy- (process {process})"),
        "nothing",
    );
    assert!(
        !own.findings
            .iter()
            .any(|finding| finding["severity"] == "warning" || finding["severity"] == "error"),
        "{own:#?}"
    );
    // Seen from another pin folder, the programs belong to another agent.
    let others = check_in(node, &lab.bpffs().join("other"), &["--attach", "xdp"]);
    others.has("error", "xdp-program", "another XDP program tp_xdp_ingress", "--attach tc");
    others.has("note", "tc-programs", "tcx program tp_tc_ingress", "bpftool net detach");
    others.has("note", "tc-programs", "at egress", "clean-up");
    others.has("error", "listener", "10256", "--healthz-address");
    assert_eq!(others.code, Some(1));
    agents[0].stop().unwrap();
    check(lab, &["--attach", "xdp"]).is_well();
}

#[test]
fn filters_of_clsact() {
    let lab = one_node(Lab::builder());
    let node = lab.node(1).netns();
    let sizes = MapSizes { flows4: 64, flows6: 64, unassured: 64, ..MapSizes::default() };
    let mut object = dataplane::load(sizes, None, &Kernel::running().unwrap()).unwrap();
    dataplane::load_programs(&mut object).unwrap();
    let mut filter = |hook, name: &str, priority| {
        let program: &mut SchedClassifier = object.program_mut(name).unwrap().try_into().unwrap();
        let handle = TcHandle::from(1);
        let options = TcAttachOptions::Netlink(NlOptions { priority, handle, ..NlOptions::default() });
        let link = node.run(|| {
            // The qdisc exists already for the second filter.
            qdisc_add_clsact("eth0").ok();
            program.attach_with_options("eth0", hook, options).unwrap()
        });
        // The filter stays with the device; dropping the link would look for the device in this
        // namespace.
        std::mem::forget(program.take_link(link).unwrap());
    };
    // An agent attaches filters below Linux 6.6.
    filter(TcAttachType::Ingress, "tp_tc_ingress", 0x7470);
    check(&lab, &[]).is_well();
    filter(TcAttachType::Egress, "tp_tc_egress", 50);
    let found =
        "TC hooks of eth0, too, and may take packets: bpf filter tp_tc_egress (priority 50) at egress";
    check(&lab, &[]).only("note", "tc-programs", found, "tc qdisc del dev eth0 clsact");
}

#[test]
fn forwarding_and_rp_filter() {
    let lab = one_node(Lab::builder());
    let node = lab.node(1).netns();
    node.sysctl("net.ipv4.ip_forward", "0").unwrap();
    check(&lab, &[]).only(
        "error",
        "forwarding",
        "IPv4 forwarding is off on eth0",
        "sysctl -w net.ipv4.ip_forward=1",
    );
    node.sysctls(&[("net.ipv4.ip_forward", "1"), ("net.ipv6.conf.all.forwarding", "0")]).unwrap();
    check(&lab, &[]).only(
        "warning",
        "forwarding",
        "IPv6 forwarding is off on eth0",
        "net.ipv6.conf.all.forwarding=1",
    );
    node.sysctls(&[("net.ipv6.conf.all.forwarding", "1"), ("net.ipv4.conf.all.rp_filter", "1")]).unwrap();
    // A node with one uplink.
    check(&lab, &["--device", "eth0"]).is_well();

    let lab = one_node(Lab::builder().two_uplinks());
    let both = ["--device", "eth0,eth1"];
    check(&lab, &both).is_well();
    lab.node(1).netns().sysctl("net.ipv4.conf.eth1.rp_filter", "1").unwrap();
    check(&lab, &both).only(
        "warning",
        "rp-filter",
        "strict on eth1",
        "sysctl -w net.ipv4.conf.eth1.rp_filter=2",
    );
}
