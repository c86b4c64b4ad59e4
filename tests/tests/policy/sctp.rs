//! SCTP from outside and from pods, through agents, devices and stacks: both policies, both
//! families, endpoints on this node and on another, while the forwarding changes, and in layouts of
//! network plugins.

mod association;

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use serde_json::json;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::lab::{Cni, Family, Lab, LabBuilder};
use traffic_policy_testing::object::{Backend, Policy, Port, Service, lease};
use traffic_policy_testing::pace::until;
use traffic_policy_testing::rows;
use traffic_policy_testing::skipped;

use self::association::{Association, Damaged, serve};

const CLUSTER: u16 = 30_090;
const LOCAL: u16 = 30_091;

fn service(name: &str, policy: Policy, node_port: u16) -> Service {
    Service::new(name).policy(policy).port(Port::sctp(80, TARGET).node_port(node_port))
}

/// The way of packets to an endpoint on another node.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Snat,
    /// Directly, in this dispatch.
    Direct(&'static str),
    /// SNAT, with `--forwarding tunnel`, which is for TCP and UDP.
    Tunnel,
    /// The other node has an agent that opens no SCTP.
    Earlier,
}

fn associations(attach: &str, way: Way) {
    associations_in(Lab::builder(), attach, way);
}

fn associations_in(lab: LabBuilder, attach: &str, way: Way) {
    let cluster = Cluster::start(lab.pods(&[1, 1])).unwrap();
    let lab = &cluster.lab;
    let lease = |node| match way {
        Way::Earlier => lease::opens(node, &Family::BOTH),
        _ => lease::tunnels_in(lab, node, "ipip,udp"),
    };
    if way != Way::Snat {
        let leases: Vec<_> = lab.nodes().iter().map(lease).collect();
        cluster.manifests.write("leases", &leases).unwrap();
    }
    let elsewhere: Vec<_> = lab.pods().filter(|pod| pod.name == "pod-2-1").map(Backend::of).collect();
    // Ended flows are counted at the end of the test, which may come later than the default of 10
    // s.
    let mut flags = vec!["--idle-reset", "1h"];
    match way {
        Way::Snat => {}
        Way::Direct(dispatch) => flags.extend(["--forwarding", "direct", "--dispatch", dispatch]),
        Way::Tunnel => flags.extend(["--forwarding", "tunnel"]),
        Way::Earlier => flags.extend(["--forwarding", "direct"]),
    }
    let agents = Agent::start_all(lab, |agent| agent.attach(attach).devices(&[]).flags(&flags)).unwrap();
    // They come when the agents run, which have loaded no program of SCTP by then.
    cluster.manifests.apply(&service("cluster", Policy::Cluster, CLUSTER), &cluster.backends()).unwrap();
    cluster.manifests.apply(&service("local", Policy::Local, LOCAL), &elsewhere).unwrap();
    for agent in &agents {
        agent.wait_said(&["SCTP is served"], Duration::from_secs(20)).unwrap();
    }
    while_served(lab, attach, |damaged| ask_all(&cluster, &agents, attach, way, damaged));
}

/// Asks while each pod has an endpoint, which must get no damaged packet.
fn while_served(lab: &Lab, what: &str, ask: impl FnOnce(&Damaged)) {
    let (stop, damaged) = (AtomicBool::new(false), Damaged::default());
    thread::scope(|scope| {
        for (number, pod) in (1..).zip(lab.pods()) {
            for family in Family::BOTH {
                let (stop, damaged) = (&stop, &damaged);
                scope.spawn(move || pod.netns().run(|| serve(pod, family, number, stop, damaged)));
            }
        }
        let asked = std::panic::AssertUnwindSafe(|| ask(&damaged));
        let ended = std::panic::catch_unwind(asked);
        stop.store(true, Relaxed);
        // This comes first: the receiver of a damaged packet does not answer, and the other side
        // waits in vain.
        let damaged = damaged.lock().unwrap();
        assert!(damaged.is_empty(), "{what}, damaged packets: {damaged:#?}");
        ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

fn ask_all(cluster: &Cluster, agents: &[Agent], attach: &str, way: Way, damaged: &Damaged) {
    let lab = &cluster.lab;
    let client = lab.client().netns();
    let mut ports = 41_000..;
    let mut associate = |family, to| Association::new(client, family, to, ports.next().unwrap(), damaged);
    for family in Family::BOTH {
        // Enough for both endpoints to be chosen: in four of a million runs one of them is not.
        let mut seen: HashMap<String, String> = HashMap::new();
        for _ in 0..20 {
            let association = associate(family, cluster.at(1, family, CLUSTER));
            let said = association.whole(&[1, 300, 1200]);
            let words: Vec<Vec<&str>> = said.iter().map(|line| line.split(' ').collect()).collect();
            for (line, length) in words.iter().zip(["1", "300", "1200"]) {
                assert_eq!(
                    *line,
                    [words[0][0], words[0][1], length],
                    "one endpoint for one association: {said:?}"
                );
            }
            seen.insert(words[0][0].to_owned(), words[0][1].to_owned());
        }
        let here = lab.client().address(family).to_string();
        let there = match way {
            Way::Direct(_) => here.clone(),
            _ => lab.source_towards_pods(lab.node(1), family).to_string(),
        };
        let expected = [("pod-1-1".to_owned(), here.clone()), ("pod-2-1".to_owned(), there)];
        assert_eq!(seen, HashMap::from(expected), "{attach} {family:?}");

        let association = associate(family, cluster.at(2, family, LOCAL));
        assert_eq!(association.whole(&[100]), [format!("pod-2-1 {here} 100")], "{attach} {family:?}");
        let nobody = associate(family, cluster.at(1, family, LOCAL));
        assert!(!nobody.is_welcome());
    }
    let hook = if attach == "tc" { "tc-ingress" } else { "xdp" };
    let outcome = if let Way::Direct(_) = way { "forwarded-direct" } else { "forwarded" };
    assert!(agents[0].packets(hook, outcome).unwrap() > 0);
    assert!(agents[0].packets(hook, "dropped-no-local-endpoint").unwrap() >= 2);
    let flows = agents[0].json(&["flows"]).unwrap();
    let flows: Vec<_> =
        flows.as_array().unwrap().iter().map(|flow| (&flow["protocol"], &flow["state"])).collect();
    let ended = (&json!("SCTP"), &json!("reset"));
    assert!(flows.len() == 40 && flows.iter().all(|flow| *flow == ended), "SHUTDOWN COMPLETE: {flows:?}");
    let source = lab.client().address(Family::V4).to_string();
    let to = format!("{}/sctp", cluster.at(1, Family::V4, LOCAL));
    let explained = agents[0].command(&["explain", &source, &to]).unwrap();
    let explained = String::from_utf8_lossy(&explained.stdout).into_owned();
    assert!(explained.contains("dropped-no-local-endpoint") && explained.contains("/SCTP"), "{explained}");
}

/// Packets of a pod to ClusterIPs are translated at its device (`--pod-services on`): an endpoint
/// on its own node, and one elsewhere, see the pod. `late`: the Services come after the agents.
fn from_a_pod(flags: &[&str], late: bool) {
    let cluster = Cluster::start(Lab::builder().pods(&[2, 1])).unwrap();
    let lab = &cluster.lab;
    let ip = |number: u8, family| match family {
        Family::V4 => IpAddr::from([10, 96, 0, number]),
        Family::V6 => IpAddr::from([0xfd00, 0x10, 0x96, 0, 0, 0, 0, number.into()]),
    };
    let endpoints = [lab.node(1).pod(2), lab.node(2).pod(1)];
    let apply = || {
        for (number, pod) in (1..).zip(endpoints) {
            let service = Service::new(&format!("service-{number}")).only_cluster_ip();
            let service = Family::BOTH.iter().fold(service, |it, family| it.cluster_ip(ip(number, *family)));
            cluster.manifests.apply(&service.port(Port::sctp(80, TARGET)), &[Backend::of(pod)]).unwrap();
        }
    };
    if !late {
        apply();
    }
    let agents = Agent::start_first(1, lab, |agent| agent.flags(flags)).unwrap();
    if late {
        apply();
        for agent in &agents {
            agent.wait_said(&["SCTP is served"], Duration::from_secs(20)).unwrap();
        }
    }
    let client = lab.node(1).pod(1);
    while_served(lab, "from a pod", |damaged| {
        for family in Family::BOTH {
            for (number, pod) in (1..).zip(endpoints) {
                let to = SocketAddr::new(ip(number, family), 80);
                let port = 42_000 + u16::from(number);
                let association = Association::new(client.netns(), family, to, port, damaged);
                if flags.is_empty() {
                    assert!(!association.is_welcome(), "{to}");
                    continue;
                }
                let seen = client.address(family);
                let expected = [1, 1200].map(|length| format!("{} {seen} {length}", pod.name));
                assert_eq!(association.whole(&[1, 1200]), expected, "{to}");
            }
        }
    });
}

rows! {
    fn from_a_pod_by_its_device() =
        from_a_pod(&["--pod-services", "on", "--local-delivery", "direct"], false);
    fn from_a_pod_when_services_come_later() = from_a_pod(&["--pod-services", "on"], true);
    fn from_a_pod_without_the_flag() = from_a_pod(&[], false);
    fn by_tc() = associations("tc", Way::Snat);
    fn by_xdp() = associations("xdp", Way::Snat);
    fn directly_within_ip_by_tc() = associations("tc", Way::Direct("ipip"));
    fn directly_within_udp_by_tc() = associations("tc", Way::Direct("udp"));
    fn directly_within_ip_by_xdp() = associations("xdp", Way::Direct("ipip"));
    fn directly_within_udp_by_xdp() = associations("xdp", Way::Direct("udp"));
    fn by_snat_to_a_node_that_opens_no_sctp() = associations("tc", Way::Earlier);
}

fn in_a_layout(cni: Cni, attach: &str, way: Way) {
    if let Some(missing) = cni.missing().unwrap() {
        return skipped(format!("SCTP in {}", cni.name()), format!("there is {missing}"));
    }
    associations_in(Lab::builder().cni(cni), attach, way);
}

rows! {
    /// The rules on the endpoint's node drop packets that conntrack calls INVALID.
    fn directly_through_an_overlay() = in_a_layout(Cni::CalicoVxlan, "tc", Way::Direct("udp"));
    fn directly_between_bridges_by_xdp() = in_a_layout(Cni::FlannelHostGw, "xdp", Way::Direct("ipip"));
    fn by_snat_where_replies_of_others_come_back() = in_a_layout(Cni::Kindnet, "tc", Way::Tunnel);
}

/// Associations keep their way, and new ones take the other: directly, and by SNAT, which is what
/// `tunnel` means for SCTP.
#[test]
fn a_change_of_the_forwarding_cuts_none() {
    let mut cluster = Cluster::start(Lab::builder().pods(&[0, 1])).unwrap();
    let leases: Vec<_> =
        cluster.lab.nodes().iter().map(|node| lease::tunnels(node, &Family::BOTH, "ipip,udp")).collect();
    cluster.manifests.write("leases", &leases).unwrap();
    let web = |forwarding: &str| {
        service("cluster", Policy::Cluster, CLUSTER).annotation("traffic-policy.io/forwarding", forwarding)
    };
    cluster.manifests.apply(&web("direct"), &cluster.backends()).unwrap();
    cluster.launch(|agent| agent).unwrap();
    let lab = &cluster.lab;
    while_served(lab, "changes", |damaged| {
        let mut open: Vec<(Association<'_>, IpAddr)> = Vec::new();
        for (round, forwarding) in (0..).zip(["direct", "tunnel", "direct", "snat"]) {
            cluster.manifests.service(&web(forwarding)).unwrap();
            until(&format!("the node in front forwards by {forwarding}"), Duration::from_secs(10), || {
                let served = cluster.agents[0].json(&["services", "default/cluster"]).unwrap();
                served.as_array().unwrap().iter().all(|port| port["forwarding"] == forwarding)
            });
            for (family, port) in Family::BOTH.into_iter().zip([43_000 + round, 44_000 + round]) {
                let to = cluster.at(1, family, CLUSTER);
                let mut association = Association::new(lab.client().netns(), family, to, port, damaged);
                association.open();
                let is_direct = forwarding == "direct";
                let seen = if is_direct { lab.client().address(family) } else { lab.node(1).address(family) };
                open.push((association, seen));
            }
            for (association, seen) in &open {
                for length in [1, 1200] {
                    let what = format!("{} under {forwarding}", association.port);
                    assert_eq!(association.say(length), format!("pod-2-1 {seen} {length}"), "{what}");
                }
            }
        }
        open.into_iter().for_each(|(association, _)| association.shut_down());
    });
}
