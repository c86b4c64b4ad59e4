//! Programs that an agent has loaded: those that serve no packet and no socket of its node do not
//! slow its start down.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use aya::programs::loaded_programs;
use traffic_policy_testing::agent::{Agent, AgentBuilder};
use traffic_policy_testing::cgroup::Cgroup;
use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Policy, Port, Service, lease};
use traffic_policy_testing::pace::until;
use traffic_policy_testing::tun::TunEnd;

const SOON: Duration = Duration::from_secs(20);

/// The names of the programs that an agent has open.
fn names(agent: &Agent) -> BTreeSet<String> {
    let folder = format!("/proc/{}/fdinfo", agent.pid().unwrap());
    let open = fs::read_dir(folder).unwrap().flatten();
    // A descriptor may be closed meanwhile.
    let open = open.filter_map(|entry| fs::read_to_string(entry.path()).ok());
    let numbers: BTreeSet<u32> = open
        .filter_map(|text| text.lines().find_map(|line| line.strip_prefix("prog_id:")?.trim().parse().ok()))
        .collect();
    let all = loaded_programs().filter_map(Result::ok);
    let own = all.filter(|program| numbers.contains(&program.id()));
    own.map(|program| program.name_as_str().unwrap().to_owned()).collect()
}

#[test]
fn without_xdp_none_that_xdp_alone_jumps_to() {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let loaded = ["xdp", "tc"].map(|attach| {
        let mut agents = Agent::start_all(&cluster.lab, |agent| agent.attach(attach)).unwrap();
        let names = names(&agents[0]);
        agents[0].stop().unwrap();
        names
    });
    let [by_xdp, by_tc] = &loaded;
    let left_out: Vec<&str> = by_xdp.difference(by_tc).map(String::as_str).collect();
    let expected = [
        "tp_xdp_icmp4",
        "tp_xdp_icmp6",
        "tp_xdp_nosctp4",
        "tp_xdp_nosctp6",
        "tp_xdp_reject4",
        "tp_xdp_reject6",
        "tp_xdp_slow4",
        "tp_xdp_slow6",
        "tp_xdp_vhdr4",
        "tp_xdp_vhdr6",
    ];
    assert_eq!(left_out, expected);
    assert!(by_tc.is_subset(by_xdp), "{by_tc:?}");
    // These are pinned for others to run.
    assert!(by_tc.contains("tp_xdp_ingress") && by_tc.contains("tp_tc_slow6"), "{by_tc:?}");
    // One answers the questions of `explain`, by the copy that it loads.
    assert!(!by_xdp.contains("tp_explain_sock"), "{by_xdp:?}");
}

/// The programs of SCTP are loaded before its first frontend is written, and those that open
/// packets of other nodes before the first of those is written. A next agent loads both at its
/// start, also when the Service is gone, since associations may be left, and when no other node has
/// a Lease: they may go on sending.
#[test]
fn those_of_sctp_and_those_that_open_packets_when_they_are_needed_and_from_then_on() {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
    let backends = cluster.backends();
    cluster.manifests.apply(&Cluster::node_port("web", Policy::Cluster, 30_080), &backends).unwrap();
    let mut agent = Agent::builder(&cluster.lab, cluster.lab.node(1)).attach("xdp").start().unwrap();
    agent.wait_ready(SOON).unwrap();
    let of_sctp = |agent: &Agent| -> Vec<String> {
        names(agent).into_iter().filter(|name| name.contains("sctp")).collect()
    };
    let opening = |agent: &Agent| -> Vec<String> {
        names(agent).into_iter().filter(|name| name.contains("_open")).collect()
    };
    let stand_ins = ["tp_tc_nosctp4", "tp_tc_nosctp6", "tp_xdp_nosctp4", "tp_xdp_nosctp6"];
    assert_eq!((of_sctp(&agent), opening(&agent)), (stand_ins.map(str::to_owned).to_vec(), vec![]));

    cluster.manifests.write("lease", &[lease::opens(cluster.lab.node(2), &Family::BOTH)]).unwrap();
    agent.wait_said(&["packets of other nodes are opened", "programs=6"], SOON).unwrap();
    let that_open = [
        "tp_tc_open4",
        "tp_tc_open6",
        "tp_tc_openback4",
        "tp_tc_openback6",
        "tp_xdp_openbk4",
        "tp_xdp_openbk6",
    ];
    assert_eq!(opening(&agent), that_open);
    assert_eq!(of_sctp(&agent), stand_ins);

    let own = [
        "tp_tc_sctp4",
        "tp_tc_sctp6",
        "tp_tc_sctp_cut4",
        "tp_tc_sctp_out4",
        "tp_tc_sctp_out6",
        "tp_xdp_sctp4",
        "tp_xdp_sctp6",
    ];
    let sctp = Service::new("sctp").port(Port::sctp(80, TARGET).node_port(30_081));
    cluster.manifests.apply(&sctp, &backends).unwrap();
    agent.wait_said(&["SCTP is served", "programs=7"], SOON).unwrap();
    let mut both = [&own[..], &stand_ins[..]].concat();
    both.sort_unstable();
    assert_eq!(of_sctp(&agent), both);
    until("its frontends", SOON, || {
        agent.json(&["services"]).is_ok_and(|services| services.to_string().contains("SCTP"))
    });
    fs::remove_file(cluster.manifests.folder().join("lease.yaml")).unwrap();
    for gone in [false, true] {
        if gone {
            cluster.manifests.delete(&sctp).unwrap();
            until("no frontend", SOON, || {
                agent.json(&["services"]).is_ok_and(|services| !services.to_string().contains("SCTP"))
            });
        }
        agent.stop().unwrap();
        agent.start_again().unwrap();
        agent.wait_ready(SOON).unwrap();
        assert_eq!(of_sctp(&agent), own, "gone: {gone}");
        assert_eq!(opening(&agent), that_open, "gone: {gone}");
    }
}

/// The programs of devices without Ethernet are loaded when the first one is attached to, and those
/// of sockets for a cgroup.
#[test]
fn those_of_sockets_and_of_devices_without_ethernet_where_there_are_any() {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let lab = &cluster.lab;
    let sctp = Service::new("sctp").port(Port::sctp(80, TARGET).node_port(30_081));
    cluster.manifests.apply(&sctp, &cluster.backends()).unwrap();
    let mut plain = Agent::start_all(lab, |agent| agent.attach("tc")).unwrap();
    let without = names(&plain[0]);
    plain[0].stop().unwrap();

    let cgroup = Cgroup::create(lab.id()).unwrap();
    let (namespace, name, mtu) = (lab.node(1).netns(), "tun9", 1500);
    let _tun = TunEnd { namespace, name, mtu }.create().unwrap();
    let start = |agent: AgentBuilder| agent.attach("tc").cgroup(cgroup.path()).devices(&["eth0", name]);
    let agents = Agent::start_all(lab, start).unwrap();
    let with = names(&agents[0]);
    let more: Vec<&str> = with.difference(&without).map(String::as_str).collect();
    let expected = [
        "tp_connect4",
        "tp_connect6",
        "tp_getpeer4",
        "tp_getpeer6",
        "tp_l3_egress",
        "tp_l3_icmp_out4",
        "tp_l3_icmp_out6",
        "tp_l3_ingress",
        "tp_l3_sctp_out4",
        "tp_l3_sctp_out6",
        "tp_l3_vhdr_out4",
        "tp_l3_vhdr_out6",
        "tp_recvmsg4",
        "tp_recvmsg6",
        "tp_sendmsg4",
        "tp_sendmsg6",
        "tp_sk_release",
        "tp_sock_ops",
    ];
    assert_eq!(more, expected);
    // The first agent met SCTP after its start.
    let fewer: Vec<&str> = without.difference(&with).map(String::as_str).collect();
    assert_eq!(fewer, ["tp_tc_nosctp4", "tp_tc_nosctp6"]);
}
