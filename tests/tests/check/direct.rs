//! Direct forwarding: what is in its way on a node, and whether another node answers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::lab::{Cni, Family, Lab};
use traffic_policy_testing::object::{Port, Service, lease};
use traffic_policy_testing::pace::until;
use traffic_policy_testing::skipped;

use crate::output::{CheckOutput, check, one_node};

#[test]
fn a_fit_node_is_asked_for_its_lease_alone() {
    let lab = one_node(Lab::builder());
    check(&lab, &["--direct"]).only("note", "direct-lease", "was not asked", "--announce-opening NAMESPACE");
}

#[test]
fn strict_source_checks_matter_with_one_uplink_too() {
    let lab = one_node(Lab::builder());
    lab.node(1).netns().run(|| std::fs::write("/proc/sys/net/ipv4/conf/all/rp_filter", "1").unwrap());
    check(&lab, &["--direct"]).has("warning", "direct", "rp_filter is strict on eth0", "eth0.rp_filter=2");
}

/// Rules as nft and iptables write them for the kernel; the unit tests have made their own.
#[test]
fn rules_that_drop_what_is_invalid_are_named() {
    if let Some(program) = Cni::missing_program() {
        let why = format!("there is no {program} (nftables, iptables, iproute2)");
        skipped("rules_that_drop_what_is_invalid_are_named", why);
        return;
    }
    let lab = one_node(Lab::builder());
    let node = lab.node(1).netns();
    let run = |line: &str| {
        let mut shell = Command::new("sh");
        shell.args(["-ec", line]);
        let output = node.output(shell).unwrap();
        assert!(output.status.success(), "{line}: {output:?}");
    };
    run(
        "nft add table inet fire; nft add chain inet fire passing '{ type filter hook forward priority 0; }'",
    );
    run("nft add rule inet fire passing ct state established accept");
    run("nft add rule inet fire passing ct state invalid counter accept");
    for (chain, rule) in [
        ("accepted", "ct state vmap { established : accept, related : accept, invalid : accept }"),
        ("others", "ct state { new, untracked } drop"),
        ("all-but", "ct state != { established, related, invalid } drop"),
        ("ports", "tcp dport vmap { 1 : drop }"),
        ("new-ports", "ct state new tcp dport != { 22, 443 } drop"),
        ("new-sources", "ct state new ip saddr != { 192.0.2.1, 192.0.2.2 } drop"),
        ("new-port-map", "ct state new tcp dport vmap { 256 : drop }"),
    ] {
        run(&format!("nft add chain inet fire {chain}; nft add rule inet fire {chain} '{rule}'"));
    }
    let passing = check(&lab, &["--direct"]);
    assert!(!passing.findings.iter().any(|finding| finding.to_string().contains("INVALID")), "{passing:#?}");

    run("nft add rule inet fire passing ct state invalid counter drop");
    // What kube-proxy leaves behind.
    for program in ["iptables", "ip6tables"] {
        run(&format!("{program} -A FORWARD -m conntrack --ctstate INVALID -j DROP"));
    }
    let by_sets = [
        ("by-map", "ct state vmap { established : accept, related : accept, invalid : drop }"),
        ("by-set", "ct state { invalid, untracked } drop"),
        ("by-rest", "ct state != { new, established, related } drop"),
        ("by-several", "ct state . meta l4proto { invalid . tcp, invalid . udp } counter drop"),
        ("by-name", "ct state vmap @verdicts"),
    ];
    run("nft add map inet fire verdicts '{ type ct_state : verdict; elements = { invalid : drop } }'");
    for (chain, rule) in by_sets {
        run(&format!("nft add chain inet fire {chain}; nft add rule inet fire {chain} '{rule}'"));
    }
    let dropping = check(&lab, &["--direct"]);
    let chains = ["passing of table inet fire", "FORWARD of table ip filter", "FORWARD of table ip6 filter"];
    let by_sets = by_sets.map(|(chain, _)| format!("{chain} of table inet fire"));
    for chain in chains.into_iter().map(str::to_owned).chain(by_sets) {
        dropping.has("warning", "direct", &format!("chain {chain}"), "let them pass");
    }
}

/// The other node opens nothing until it knows this one's addresses: nobody answers, which the
/// check cannot tell from a network that lets nothing pass.
#[test]
fn another_node_answers_once_it_opens_packets() {
    let vips: [IpAddr; 2] =
        [Ipv4Addr::new(203, 0, 113, 9).into(), Ipv6Addr::new(0x2001, 0xdb8, 5, 0, 0, 0, 0, 9).into()];
    let mut cluster = Cluster::start(Lab::builder().pods(&[0, 1])).unwrap();
    let of = |number| lease::opens_dispatch(cluster.lab.node(number), &Family::BOTH, "ipip,udp");
    cluster.manifests.write("other", &[of(2)]).unwrap();
    let own = of(1);
    let service = Service::new("web").port(Port::tcp(80, TARGET)).vip(vips[0]).vip(vips[1]);
    cluster.manifests.apply(&service, &cluster.backends()).unwrap();
    cluster.launch(|agent| agent.flags(&["--forwarding", "direct"])).unwrap();
    let asked = || {
        let flags = ["check", "--direct", "node-2", "--cgroup", "none", "--output", "json"];
        CheckOutput::of(&cluster.agents[0].command(&flags).unwrap())
    };
    asked().has("warning", "direct-peer", "node-2", "--forwarding snat");
    cluster.manifests.write("own", &[own]).unwrap();
    until("node-2 answers", Duration::from_secs(20), || {
        let answered = asked().findings.into_iter().filter(|finding| {
            finding["probe"] == "direct-peer"
                && finding["severity"] == "ok"
                && finding["found"].as_str().unwrap().contains("and within UDP")
        });
        answered.count() == 2
    });
}

/// Two nodes with agents that send to MAC addresses, a pod on the second, which the first asks.
struct Asking {
    cluster: Cluster,
}

const VIPS: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(203, 0, 113, 9)), IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 5, 0, 0, 0, 0, 9))];
const PATIENCE: Duration = Duration::from_secs(20);

impl Asking {
    fn start() -> Self {
        let mut cluster = Cluster::start(Lab::builder().pods(&[0, 1])).unwrap();
        let leases: Vec<_> = [1, 2]
            .iter()
            .map(|number| {
                let mut lease = lease::takes(cluster.lab.node(*number), None);
                lease["metadata"]["annotations"]["traffic-policy.io/opens-reply"] = "tunnel".into();
                lease
            })
            .collect();
        cluster.manifests.write("leases", &leases).unwrap();
        let service = Service::new("web").port(Port::tcp(80, TARGET)).vip(VIPS[0]).vip(VIPS[1]);
        cluster.manifests.apply(&service, &cluster.backends()).unwrap();
        let flags =
            ["--forwarding", "direct", "--algorithm", "maglev", "--maglev-size", "251", "--dispatch", "l2"];
        cluster.launch(|agent| agent.attach("tc").flags(&flags)).unwrap();
        let asking = Self { cluster };
        until("node-2 answers", PATIENCE, || asking.of("node-2").all("direct-peer") == ["ok", "ok"]);
        asking
    }

    fn of(&self, peer: &str) -> CheckOutput {
        let flags = ["check", "--direct", peer, "--cgroup", "none", "--output", "json"];
        CheckOutput::of(&self.cluster.agents[0].command(&flags).unwrap())
    }

    /// Asks while the ports of both nodes at the switch drop what these rules say.
    fn behind(&self, rules: &str) -> CheckOutput {
        let router = self.cluster.lab.router();
        let table = format!(
            "table netdev cloud {{\n chain c {{ type filter hook ingress devices = {{ \"node-1\", \"node-2\" }} priority 0; policy accept;\n{rules}\n }}\n}}\n"
        );
        router.feed("nft", &["-f", "-"], &table).unwrap();
        let output = self.of("node-2");
        router.feed("nft", &["-f", "-"], "delete table netdev cloud\n").unwrap();
        output
    }
}

#[test]
fn another_node_is_asked_for_each_way() {
    let asking = Asking::start();
    let output = asking.of("node-2");
    for probe in ["direct-peer", "direct-mtu", "direct-tunnel", "direct-l2"] {
        assert_eq!(output.all(probe), ["ok", "ok"], "{probe} {output:#?}");
    }
    assert_eq!(output.code, Some(0), "{output:#?}");

    // It is named by an address, too, and what has no Lease is not asked.
    let by_address = asking.of(&asking.cluster.lab.node(2).address(Family::V6).to_string());
    assert_eq!(by_address.all("direct-peer"), ["ok", "ok"], "{by_address:#?}");
    let output = asking.of("192.0.2.77");
    output.has("warning", "direct-peer", "to 192.0.2.77: no other node's Lease", "in its Lease");
    assert_eq!(output.code, Some(0), "{output:#?}");

    // What the network may forbid, the finding, and what to do.
    let [v4, v6] = Family::BOTH.map(|family| asking.cluster.lab.node(2).pod(1).address(family));
    let foreign = format!("ip saddr {} drop\nip6 saddr {} drop", VIPS[0], VIPS[1]);
    let output = asking.behind(&format!("{foreign}\nip protocol 4 drop\nip6 nexthdr 41 drop"));
    output.has("warning", "direct-peer", "opens packets", "--forwarding tunnel --dispatch udp, on");
    let output = asking.behind("ip protocol 4 drop\nip6 nexthdr 41 drop");
    output.has("warning", "direct-peer", "and none within protocol 41", "--dispatch udp");
    output.has("note", "direct-tunnel", "and not within protocol 4", "--dispatch udp");
    let to_front = Family::BOTH.map(|family| asking.cluster.lab.node(1).address(family));
    let output = asking.behind(&format!(
        "ip protocol 4 ip daddr {} drop\nip6 nexthdr 41 ip6 daddr {} drop\nudp dport 6080 ip daddr {} drop\nudp dport 6080 ip6 daddr {} drop",
        to_front[0], to_front[1], to_front[0], to_front[1]
    ));
    assert_eq!(output.all("direct-peer"), ["ok", "ok"], "{output:#?}");
    output.has("note", "direct-tunnel", "would not be heard", "to addresses of nodes");
    let output = asking.behind(&format!("ip daddr {} drop\nip6 daddr {} drop", VIPS[0], VIPS[1]));
    assert_eq!(output.all("direct-peer"), ["ok", "ok"], "{output:#?}");
    output.has("warning", "direct-l2", "answers no packet that is sent there", "--dispatch auto");
    let output = asking.behind("ip length > 1450 drop\nip6 length > 1410 drop");
    for (endpoint, within) in [(v4, "1430 bytes fit within IP"), (v6, "1410 bytes fit within IP")] {
        output.has("warning", "direct-mtu", &format!("({endpoint}) is lost"), "mtu 1450");
        output.has(
            "warning",
            "direct-mtu",
            &format!("one of 1450 is answered: packets of up to {within}"),
            "",
        );
    }
}

#[test]
fn the_mtu_is_that_of_the_route() {
    let asking = Asking::start();
    let (node, there) = (asking.cluster.lab.node(1), asking.cluster.lab.node(2));
    let says = |output: &CheckOutput, texts: [&str; 2]| {
        for (family, text) in Family::BOTH.into_iter().zip(texts) {
            let pod = there.pod(1).address(family).to_string();
            let is_it = |finding: &Value| {
                let found = finding["found"].as_str().unwrap();
                let is_ok = finding["probe"] == "direct-mtu" && finding["severity"] == "ok";
                is_ok && found.contains(&pod) && found.contains(text)
            };
            assert!(output.findings.iter().any(is_it), "{pod} {text} {output:#?}");
        }
    };
    says(&asking.of("node-2"), ["is 1500, that of the device"; 2]);
    for (family, flag, prefix) in [(Family::V4, "-4", 32), (Family::V6, "-6", 128)] {
        let (pod, via) = (there.pod(1).address(family), there.address(family));
        let route = format!("{flag} route add {pod}/{prefix} via {via} mtu 1400");
        node.netns().feed("ip", &route.split(' ').collect::<Vec<_>>(), "").unwrap();
    }
    let output = asking.of("node-2");
    says(&output, ["is 1400, that its route names"; 2]);
    let fits =
        ["1380 bytes fit within IP, of up to 1372 within", "1360 bytes fit within IP, of up to 1352 within"];
    says(&output, fits);
}
