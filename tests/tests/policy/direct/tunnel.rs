//! Replies that go back through the node in front, within packets (`--forwarding tunnel`), in a
//! network that lets no node send from an address which is not its own, as clouds do.

use std::net::{IpAddr, SocketAddr};
use std::thread::sleep;
use std::time::Duration;

use traffic_policy_testing::capture::{Capture, Frame};
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Addresses, Family, Lab, LabBuilder, plan};
use traffic_policy_testing::object::lease;
use traffic_policy_testing::pace::until;
use traffic_policy_testing::traffic::transfer::transfer;
use traffic_policy_testing::traffic::{HeldConnections, Outcome};

use crate::route_mtus::narrow;

use super::{IP6IP6, IPIP, NODE_PORT, PATIENCE, VIP_PORT, VIPS, answers, header, seen, service, targets};

const UDP: u8 = 17;

/// Starts three nodes with agents, and a pod on the second and the third. `former`: the numbers of
/// nodes with a Lease as an agent of a former version writes it, which would answer clients itself.
fn start(attach: &str, flags: &[&str], former: &[usize]) -> Cluster {
    start_lab(Lab::builder().pods(&[0, 1, 1]), attach, flags, former)
}

fn start_lab(lab: LabBuilder, attach: &str, flags: &[&str], former: &[usize]) -> Cluster {
    let mut cluster = Cluster::start(lab).unwrap();
    let leases: Vec<_> = (1..=cluster.lab.nodes().len())
        .map(|number| {
            let node = cluster.lab.node(number);
            if former.contains(&number) {
                lease::opens_dispatch(node, &Family::BOTH, "ipip,udp")
            } else {
                lease::tunnels(node, &Family::BOTH, "ipip,udp")
            }
        })
        .collect();
    cluster.manifests.write("leases", &leases).unwrap();
    cluster.manifests.apply(&service(), &cluster.backends()).unwrap();
    cluster.launch(|agent| agent.attach(attach).flags(flags)).unwrap();
    for vip in VIPS {
        cluster.lab.route_vip(vip, cluster.lab.node(1)).unwrap();
    }
    forbid_foreign_sources(&cluster);
    cluster
}

/// Drops at each node's port of the switch what has a source that is neither the node's nor one of
/// its pods'. The addresses of the load balancer belong to nodes without pods.
fn forbid_foreign_sources(cluster: &Cluster) {
    let mut rules = "table netdev cloud {\n".to_owned();
    for node in cluster.lab.nodes() {
        let own = |family: Family| {
            let mut allowed: Vec<_> = node.pods.iter().map(|pod| pod.address(family)).collect();
            allowed.push(node.address(family));
            if node.pods.is_empty() {
                allowed.push(VIPS[usize::from(family == Family::V6)]);
            }
            allowed.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ")
        };
        rules += &format!(
            "chain {0} {{ type filter hook ingress device \"{0}\" priority 0; policy accept;\n\
             ip saddr != {{ {1} }} drop\n\
             ip6 saddr != {{ {2}, fe80::/10 }} drop\n }}\n",
            node.name,
            own(Family::V4),
            own(Family::V6)
        );
    }
    rules += "}\n";
    cluster.lab.router().feed("nft", &["-f", "-"], &rules).unwrap();
}

/// The frames that a node's uplink sends or receives, while `work` is done.
fn frames(cluster: &Cluster, numbers: &[usize], work: impl FnOnce()) -> Vec<Frame> {
    let of = |number: &usize| Capture::start(cluster.lab.node(*number).netns(), "eth0").unwrap();
    let captures: Vec<_> = numbers.iter().map(of).collect();
    work();
    captures.into_iter().flat_map(|capture| capture.finish_valid().unwrap()).collect()
}

/// Frames with this direction, protocol, source and destination.
fn count(
    frames: &[Frame],
    outgoing: bool,
    protocol: Option<u8>,
    from: impl Fn(IpAddr) -> bool,
    to: IpAddr,
) -> usize {
    let is_one = |frame: &&Frame| {
        frame.outgoing == outgoing
            && header(frame).is_some_and(|(found, source, destination)| {
                protocol.is_none_or(|protocol| protocol == found) && from(source) && destination == to
            })
    };
    frames.iter().filter(is_one).count()
}

fn replies_pass_the_node_in_front(attach: &str, dispatch: &str, within: fn(Family) -> u8) {
    let mut cluster = start(attach, &["--forwarding", "tunnel", "--dispatch", dispatch], &[]);
    clients_are_answered_by_the_node_in_front(&cluster, attach, dispatch, within);
    what_the_pod_refuses_is_refused_at_once(&mut cluster);
}

fn clients_are_answered_by_the_node_in_front(
    cluster: &Cluster,
    attach: &str,
    dispatch: &str,
    within: fn(Family) -> u8,
) {
    let (front, homes) = (cluster.lab.node(1), [cluster.lab.node(2), cluster.lab.node(3)]);
    for (protocol, (family, to)) in Protocol::BOTH
        .into_iter()
        .flat_map(|protocol| targets(cluster).into_iter().map(move |target| (protocol, target)))
    {
        let what = format!("{attach} {dispatch} {protocol:?} {to}");
        let client = cluster.lab.client().address(family);
        let mut answered = Vec::new();
        let all = frames(cluster, &[1, 2, 3], || answered = answers(cluster, protocol, to));
        for node in ["node-2", "node-3"] {
            let seen = seen(&answered, node);
            assert!(!seen.is_empty(), "{what}: {node} was never chosen");
            assert!(seen.iter().all(|ip| *ip == client), "{what}: {seen:?}");
        }
        let of_home = |ip| homes.iter().any(|node| node.address(family) == ip);
        let outer = Some(within(family));
        let sent = count(&all, true, outer, of_home, front.address(family));
        assert!(sent >= 20, "{what}: {sent} replies within packets");
        // A capture does not see what XDP sends: the counter shows it below.
        let opened = count(&all, true, None, |ip| ip == to.ip(), client);
        assert!(attach == "xdp" || opened >= 20, "{what}: {opened} replies to the client");
        // No other node has sent them.
        let by_front = frames(cluster, &[2, 3], || drop(answers(cluster, protocol, to)));
        assert_eq!(count(&by_front, true, None, |ip| ip == to.ip(), client), 0, "{what}");
    }
    let flows = cluster.agents[0].json(&["flows"]).unwrap();
    let flows = flows.as_array().unwrap();
    assert!(!flows.is_empty() && flows.iter().all(|flow| flow["kind"] == "tunnel"), "{flows:?}");
    let served = cluster.agents[0].json(&["services", "default/web"]).unwrap();
    assert!(served.as_array().unwrap().iter().all(|port| port["forwarding"] == "tunnel"), "{served:?}");
    let hook = if attach == "tc" { "tc-ingress" } else { "xdp" };
    assert!(cluster.agents[0].packets(hook, "replied-opened").unwrap() > 0, "{attach}");
    for agent in &cluster.agents[1..] {
        assert!(agent.packets("tc-egress", "replied-to-front").unwrap() > 0, "{attach}");
        assert_eq!(agent.packets("tc-egress", "replied-local").unwrap(), 0, "{attach}");
    }
}

#[test]
fn replies_pass_the_node_in_front_tc() {
    replies_pass_the_node_in_front("tc", "ipip", |family| if family == Family::V4 { IPIP } else { IP6IP6 });
}

#[test]
fn replies_pass_the_node_in_front_xdp() {
    replies_pass_the_node_in_front("xdp", "ipip", |family| if family == Family::V4 { IPIP } else { IP6IP6 });
}

#[test]
fn replies_pass_the_node_in_front_within_udp() {
    replies_pass_the_node_in_front("tc", "udp", |_| UDP);
}

/// The control: what the network forbids is what `direct` does.
fn direct_forwarding_is_not_answered_there(cluster: &Cluster) {
    let homes = cluster.agents[1..].iter();
    let replies =
        || -> u64 { homes.clone().map(|agent| agent.packets("tc-egress", "replied-local").unwrap()).sum() };
    let before = replies();
    cluster.manifests.service(&service().annotation("traffic-policy.io/forwarding", "direct")).unwrap();
    until("direct forwarding", PATIENCE, || {
        let served = cluster.agents[0].json(&["services", "default/web"]).unwrap();
        served.as_array().unwrap().iter().all(|port| port["forwarding"] == "direct")
    });
    for family in Family::BOTH {
        let to = cluster.at(1, family, NODE_PORT);
        let probe = Protocol::Tcp.probe(to).limit(Duration::from_secs(1));
        let outcome = probe.from(cluster.lab.client().netns()).unwrap();
        assert!(!matches!(outcome, Outcome::Answered(_)), "{to}: {outcome:?}");
    }
    assert!(replies() > before, "it was the network");
}

/// An agent of a former version would answer the client itself: its endpoints get packets with the
/// address of the node in front.
#[test]
fn a_node_of_a_former_version_gets_packets_as_ever() {
    let cluster = start("tc", &["--forwarding", "tunnel"], &[3]);
    for family in Family::BOTH {
        let (client, front) = (cluster.lab.client().address(family), cluster.lab.node(1).address(family));
        let vip = SocketAddr::new(VIPS[usize::from(family == Family::V6)], VIP_PORT);
        for to in [cluster.at(1, family, NODE_PORT), vip] {
            let answers = answers(&cluster, Protocol::Tcp, to);
            for (node, address) in [("node-2", client), ("node-3", front)] {
                let seen = seen(&answers, node);
                let all = !seen.is_empty() && seen.iter().all(|ip| *ip == address);
                assert!(all, "{node} {to}: {seen:?}");
            }
        }
    }
}

/// Requests to a pod without a server: TCP is answered by its RST, UDP by an ICMP error.
fn what_the_pod_refuses_is_refused_at_once(cluster: &mut Cluster) {
    let pods: Vec<_> = cluster.lab.pods().map(|pod| pod.name.clone()).collect();
    for pod in pods {
        cluster.stop_server(&pod);
    }
    for (family, protocol) in Family::BOTH.into_iter().flat_map(|one| Protocol::BOTH.map(|two| (one, two))) {
        let to = cluster.at(1, family, NODE_PORT);
        let outcome = cluster.ask(protocol, to).unwrap();
        assert!(outcome.is_refused_at_once(), "{protocol:?} {to}: {outcome:?}");
    }
}

/// Open connections stay where they are, whichever way new ones take.
#[test]
fn the_annotation_changes_it_without_cutting_a_connection() {
    let cluster = start("tc", &[], &[]);
    let to = Family::BOTH.map(|family| cluster.at(1, family, NODE_PORT));
    let (client, front) = (cluster.lab.client().addresses, cluster.lab.node(1).addresses);
    let is_seen = |addresses: Addresses| {
        for (to, family) in to.into_iter().zip(Family::BOTH) {
            let ip = addresses.of(family);
            until(&format!("pods see {ip}"), PATIENCE, || {
                answers(&cluster, Protocol::Tcp, to).iter().all(|answer| answer.client.ip() == ip)
            });
        }
    };
    let pause = Duration::from_millis(20);
    let held = || HeldConnections::start(cluster.lab.client().netns(), &to, 8, pause).unwrap();
    let first = held();
    cluster.manifests.service(&service().annotation("traffic-policy.io/forwarding", "tunnel")).unwrap();
    is_seen(client);
    let second = held();
    cluster.manifests.service(&service()).unwrap();
    is_seen(front);
    for (begun, held) in [("snat", first), ("tunnel", second)] {
        let report = held.finish();
        assert!(report.is_clean(), "begun under {begun}: {report}");
    }
    direct_forwarding_is_not_answered_there(&cluster);
}

/// The router sends everything to another node: replies follow the requests.
#[test]
fn replies_follow_to_another_node_in_front() {
    let flags = ["--forwarding", "tunnel", "--algorithm", "maglev"];
    let cluster = start_lab(Lab::builder().pods(&[0, 0, 1, 1]), "tc", &flags, &[]);
    let to = VIPS.map(|vip| SocketAddr::new(vip, VIP_PORT));
    let pause = Duration::from_millis(20);
    let held = HeldConnections::start(cluster.lab.client().netns(), &to, 16, pause).unwrap();
    // Every connection is established, and has had requests.
    sleep(Duration::from_millis(500));
    cluster.lab.cut(cluster.lab.node(1)).unwrap();
    for vip in VIPS {
        cluster.lab.route_vip(vip, cluster.lab.node(2)).unwrap();
    }
    // Requests that were under way are sent again, after 200 ms at least, and then twice that.
    sleep(Duration::from_secs(2));
    let report = held.finish();
    assert!(report.broken.is_empty() && report.connections == 16, "{report}");
    assert!(cluster.agents[1].packets("tc-ingress", "replied-opened").unwrap() > 0);
}

/// 30 MB each way at once, every byte compared: the endpoint's segments fit once it has heard of
/// the smaller MTU.
fn bulk_data_passes(attach: &str, dispatch: &str, wire_offloads: bool) {
    let lab = Lab::builder().pods(&[0, 1]).wire_offloads(wire_offloads);
    let cluster = start_lab(lab, attach, &["--forwarding", "tunnel", "--dispatch", dispatch], &[]);
    for family in Family::BOTH {
        let to = cluster.at(1, family, NODE_PORT);
        let report = transfer(cluster.lab.client().netns(), to, 30_000_000).unwrap();
        println!("{attach} {dispatch} {family:?}: {report:?}");
    }
    for agent in &cluster.agents {
        for outcome in ["dropped-internal-error", "dropped-unknown-endpoint", "dropped-mtu-exceeded"] {
            for hook in ["xdp", "tc-ingress", "tc-egress"] {
                assert_eq!(agent.packets(hook, outcome).unwrap(), 0, "{attach} {hook} {outcome}");
            }
        }
    }
    assert!(cluster.agents[1].packets("tc-egress", "rejected-mtu-exceeded").unwrap() > 0);
}

#[test]
fn bulk_data_passes_tc_with_offloads() {
    bulk_data_passes("tc", "ipip", true);
}

#[test]
fn bulk_data_passes_within_udp_with_offloads() {
    bulk_data_passes("tc", "udp", true);
}

#[test]
fn bulk_data_passes_xdp() {
    bulk_data_passes("xdp", "ipip", false);
}

/// The way from the node in front to the client is narrower than the one between nodes: the pod
/// hears of it, by its node, and sends segments that fit.
#[test]
fn replies_too_long_for_the_way_to_the_client_become_shorter() {
    for (attach, dispatch, wire_offloads) in
        [("tc", "ipip", false), ("tc", "ipip", true), ("xdp", "udp", false)]
    {
        let flags = ["--forwarding", "tunnel", "--dispatch", dispatch];
        let lab = Lab::builder().pods(&[0, 1]).wire_offloads(wire_offloads);
        let cluster = start_lab(lab, attach, &flags, &[]);
        for family in Family::BOTH {
            let (client, router) = (cluster.lab.client().address(family), plan::gateway(0).of(family));
            narrow(cluster.lab.node(1).netns(), family, client, router, 1300);
            let report = transfer(cluster.lab.client().netns(), cluster.at(1, family, NODE_PORT), 1_000_000);
            println!("{attach} {dispatch} {wire_offloads} {family:?}: {:?}", report.unwrap());
        }
        let front = &cluster.agents[0];
        let told = |outcome| -> u64 {
            ["xdp", "tc-ingress"].iter().map(|hook| front.packets(hook, outcome).unwrap()).sum()
        };
        assert!(told("rejected-mtu-exceeded") >= 2, "{attach} {dispatch}");
        assert_eq!(told("dropped-mtu-exceeded"), 0, "{attach} {dispatch}");
    }
}
