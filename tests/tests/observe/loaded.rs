//! Programs that an agent has loaded: those that serve no packet in its attach mode do not slow its
//! start down.

use std::collections::BTreeSet;
use std::fs;

use aya::programs::loaded_programs;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::Lab;

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
        "tp_xdp_reject4",
        "tp_xdp_reject6",
        "tp_xdp_sctp4",
        "tp_xdp_sctp6",
        "tp_xdp_slow4",
        "tp_xdp_slow6",
        "tp_xdp_vhdr4",
        "tp_xdp_vhdr6",
    ];
    assert_eq!(left_out, expected);
    assert!(by_tc.is_subset(by_xdp), "{by_tc:?}");
    // These are pinned for others to run.
    assert!(by_tc.contains("tp_xdp_ingress") && by_tc.contains("tp_tc_slow6"), "{by_tc:?}");
}
