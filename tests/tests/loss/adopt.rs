//! Migration from kube-proxy and back: connections that began under its rules are adopted from
//! conntrack before the rules are removed.

use std::net::{IpAddr, SocketAddr};
use std::thread::sleep;
use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::kube_proxy::{Backend, KubeProxy, Rules, TCP_AND_UDP};
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::netns::Namespace;
use traffic_policy_testing::object::{Policy, Port, Service};
use traffic_policy_testing::traffic::datagrams::Report;
use traffic_policy_testing::traffic::{Datagrams, HeldConnections, retransmissions};

use crate::cluster::{self, PATIENCE, POD_PORT};
use crate::quiet;

/// The name, the policy and the node port of each Service.
const POLICIES: [(&str, Policy, u16); 2] =
    [("every", Policy::Cluster, 30080), ("near", Policy::Local, 30081)];
/// The number of connections, and of flows of datagrams, to all frontends together.
const HELD: usize = 100;
const DATAGRAMS_PER_SECOND: u32 = 500;
const PAUSE: Duration = Duration::from_millis(20);

fn address(family: Family, host: u8, range: &str) -> IpAddr {
    let text = match (family, range) {
        (Family::V4, "vip") => format!("198.51.100.{host}"),
        (Family::V4, _) => format!("10.96.0.{host}"),
        (Family::V6, "vip") => format!("2001:db8:51::{host}"),
        (Family::V6, _) => format!("fd00:10:96::{host}"),
    };
    text.parse().unwrap()
}

/// A node with a pod, one behind it, and rules of kube-proxy on the first.
struct Takeover {
    cluster: Cluster,
    family: Family,
}

impl Takeover {
    fn new(attach: &str, family: Family) -> Self {
        let cluster = cluster::without_agents(&[1, 1], attach);
        for (host, (name, policy, node_port)) in (10..).zip(POLICIES) {
            let service = Service::new(name)
                .families(&[family])
                .policy(policy)
                .cluster_ip(address(family, host, "cluster"))
                .vip(address(family, host, "vip"))
                .port(Port::tcp(80, POD_PORT).node_port(node_port))
                .port(Port::udp(80, POD_PORT).node_port(node_port));
            cluster.manifests.apply(&service, &cluster.backends()).unwrap();
            cluster.lab.route_vip(address(family, host, "vip"), cluster.lab.node(1)).unwrap();
        }
        // CNI plugins set it, too: where bridges use iptables (net.bridge.bridge-nf-call-iptables),
        // a packet of a pod that is translated to the pod itself leaves by the port on which it
        // arrived. Without hairpin each such SYN is lost while the pod's neighbour entry is fresh,
        // and is forwarded a second later.
        cluster.lab.node(1).netns().netlink(async |net| net.hairpin("veth1").await).unwrap();
        Self { cluster, family }
    }

    fn node(&self) -> &Namespace {
        self.cluster.lab.node(1).netns()
    }

    fn kube_proxy(&self, backend: Backend) -> KubeProxy<'_> {
        let family = self.family;
        let endpoint =
            |node: usize| SocketAddr::new(self.cluster.lab.node(node).pod(1).address(family), POD_PORT);
        let services: Vec<_> = (10..)
            .zip(POLICIES)
            .map(|(host, (name, policy, node_port))| Rules {
                name: name.to_owned(),
                protocols: TCP_AND_UDP.to_vec(),
                cluster_ip: SocketAddr::new(address(family, host, "cluster"), 80),
                vip: Some(SocketAddr::new(address(family, host, "vip"), 80)),
                node_port: Some(node_port),
                endpoints: vec![endpoint(1), endpoint(2)],
                local: (policy == Policy::Local).then(|| vec![endpoint(1)]),
            })
            .collect();
        let proxy = KubeProxy::start(self.cluster.lab.node(1), family, backend, &services).unwrap();
        // Ended flows of datagrams are removed soon.
        self.node()
            .sysctls(&[
                ("net.netfilter.nf_conntrack_udp_timeout", "20"),
                ("net.netfilter.nf_conntrack_udp_timeout_stream", "20"),
            ])
            .unwrap();
        proxy
    }

    /// The addresses for clients outside: node port and load balancer's address, of both policies.
    fn outside(&self) -> Vec<SocketAddr> {
        let vips = (10..12).map(|host| SocketAddr::new(address(self.family, host, "vip"), 80));
        let ports = POLICIES.map(|(_, _, port)| self.cluster.at(1, self.family, port));
        ports.into_iter().chain(vips).collect()
    }

    fn start_load(&self, what: &str) -> Load {
        let lab = &self.cluster.lab;
        let (client, targets) = (lab.client().netns(), self.outside());
        let inside: Vec<_> =
            (10..12).map(|host| SocketAddr::new(address(self.family, host, "cluster"), 80)).collect();
        let hold = |netns, targets: &[SocketAddr], count| {
            HeldConnections::start(netns, targets, count, PAUSE).unwrap()
        };
        let pod = lab.node(1).pod(1).netns();
        let held = vec![hold(client, &targets, HELD), hold(self.node(), &inside, 20), hold(pod, &inside, 20)];
        let flows = HELD / targets.len();
        let each = DATAGRAMS_PER_SECOND / u32::try_from(targets.len()).unwrap();
        let datagrams = targets
            .iter()
            .map(|target| Datagrams::start(client, *target, flows, each, &self.cluster.ledger).unwrap())
            .collect();
        // Each flow goes on with five datagrams a second: conntrack has seen answers on all by
        // then.
        sleep(Duration::from_millis(500));
        let pod = pod.clone();
        let lost = retransmissions::lost_in_namespace(&pod).unwrap();
        Load { what: what.to_owned(), held, datagrams, pod, lost }
    }

    fn agent(&self, attach: &str, flags: &[&str]) -> Agent {
        let agent = Agent::builder(&self.cluster.lab, self.cluster.lab.node(1))
            .attach(attach)
            .flags(flags)
            .start()
            .unwrap();
        agent.wait_ready(PATIENCE).unwrap();
        agent
    }
}

/// The meters at a client outside, on the node and in one of its pods.
struct Load {
    what: String,
    held: Vec<HeldConnections>,
    datagrams: Vec<Datagrams>,
    /// The pod that is a client, and the number of segments that it had sent, as client and as
    /// server, and that were lost, when all connections were open.
    pod: Namespace,
    lost: u64,
}

/// The counts of all meters.
struct Lost {
    /// Lost connections from outside.
    connections: u64,
    broken: usize,
    /// Ended connections of all meters.
    ended: usize,
    datagrams: u64,
    clean: bool,
    report: String,
}

impl Load {
    fn stop(self) -> Lost {
        let datagrams: Vec<_> = self.datagrams.into_iter().map(|meter| meter.finish().unwrap()).collect();
        let held: Vec<_> = self.held.into_iter().map(HeldConnections::finish).collect();
        let lost = retransmissions::lost_in_namespace(&self.pod).unwrap().saturating_sub(self.lost);
        let lines = datagrams.iter().map(ToString::to_string).chain(held.iter().map(ToString::to_string));
        let report = format!(
            "{}\n  {}\n  segments of the pod lost meanwhile: {lost}",
            self.what,
            lines.collect::<Vec<_>>().join("\n  ")
        );
        let [outside, node, pod] = held.as_slice() else { panic!("three meters") };
        let pod_is_clean = pod.is_clean() && lost == 0;
        println!("{report}");
        Lost {
            connections: outside.connections,
            broken: outside.broken.len(),
            ended: held.iter().map(|held| held.broken.len()).sum(),
            datagrams: datagrams.iter().map(|report| report.lost_there + report.lost_back).sum(),
            clean: datagrams.iter().all(Report::is_clean)
                && outside.is_clean()
                && node.is_clean()
                && pod_is_clean,
            report,
        }
    }
}

fn skips(test: &str, backend: Backend) -> bool {
    let skips = !backend.is_there();
    if skips {
        traffic_policy_testing::skipped(
            test,
            format!("{} is not here (`cargo xtask setup`)", backend.program()),
        );
    }
    skips
}

/// Connections are adopted at the start of the agent; the agent is killed and restarted; NAT is
/// removed when the last of them has ended.
fn adopted(test: &str, backend: Backend, attach: &str, family: Family) {
    if skips(test, backend) {
        return;
    }
    let alone = quiet::alone();
    let takeover = Takeover::new(attach, family);
    let kube_proxy = takeover.kube_proxy(backend);
    let load =
        takeover.start_load(&format!("{backend:?} {attach} {family:?}, --adopt, kube-proxy's rules removed"));
    let mut agent = takeover.agent(attach, &["--adopt"]);
    agent.wait_said(&["adopted kube-proxy's connections"], PATIENCE).unwrap();
    let flows = agent.json(&["flows"]).unwrap();
    let left = flows.as_array().unwrap().iter().filter(|flow| flow["kind"] == "conntrack").count();
    assert!(left >= 2 * HELD + 40, "{left} are in the flow table");
    kube_proxy.clean().unwrap();
    // All meters run for this time without kube-proxy's rules, with fifty requests on each
    // connection.
    sleep(Duration::from_secs(1));
    // The agent serves new connections.
    for protocol in Protocol::BOTH {
        for target in takeover.outside() {
            takeover.cluster.answer(protocol, target).unwrap();
        }
    }
    agent.kill().unwrap();
    agent.start_again().unwrap();
    agent.wait_ready(PATIENCE).unwrap();
    // The agent reads conntrack every 5 s.
    sleep(Duration::from_secs(7));
    let lost = load.stop();
    // Nothing is measured from here on: conntrack's entries have to time out.
    drop(alone);
    assert!(lost.clean, "{}", lost.report);
    agent.wait_said(&["NAT is not kept any more"], Duration::from_secs(60)).unwrap();
    let flows = agent.json(&["flows"]).unwrap();
    assert!(flows.as_array().unwrap().iter().all(|flow| flow["kind"] != "conntrack"), "{flows}");
}

#[test]
fn adopted_from_nftables() {
    adopted("adopted_from_nftables", Backend::Nftables, "tc", Family::V4);
}

#[test]
fn adopted_from_nftables_ipv6() {
    adopted("adopted_from_nftables_ipv6", Backend::Nftables, "xdp", Family::V6);
}

#[test]
fn adopted_from_iptables_nft() {
    adopted("adopted_from_iptables_nft", Backend::IptablesNft, "xdp", Family::V4);
}

#[test]
fn adopted_from_iptables_legacy() {
    adopted("adopted_from_iptables_legacy", Backend::IptablesLegacy, "tc", Family::V6);
}

/// The control: without adoption they end, all of them.
#[test]
fn without_adoption_connections_end() {
    let backend = Backend::Nftables;
    if skips("without_adoption_connections_end", backend) {
        return;
    }
    let _alone = quiet::alone();
    let takeover = Takeover::new("tc", Family::V4);
    let kube_proxy = takeover.kube_proxy(backend);
    let load = takeover.start_load("without --adopt, kube-proxy's rules removed");
    let _agent = takeover.agent("tc", &[]);
    kube_proxy.clean().unwrap();
    // All meters run for this time without kube-proxy's rules, with fifty requests on each
    // connection.
    sleep(Duration::from_secs(1));
    let lost = load.stop();
    assert_eq!(lost.broken, HELD, "{}", lost.report);
}

/// Adoption by the command, for an agent that was started without the flag. Connections to the
/// node's own addresses have gone on until then.
#[test]
fn adopted_by_the_command() {
    let backend = Backend::Nftables;
    if skips("adopted_by_the_command", backend) {
        return;
    }
    let _alone = quiet::alone();
    let takeover = Takeover::new("tc", Family::V4);
    let kube_proxy = takeover.kube_proxy(backend);
    let targets = POLICIES.map(|(_, _, port)| takeover.cluster.at(1, Family::V4, port));
    let client = takeover.cluster.lab.client().netns();
    let held = HeldConnections::start(client, &targets, HELD, PAUSE).unwrap();
    let agent = takeover.agent("tc", &[]);
    let output = agent.command(&["adopt"]).unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && said.contains("adopted 100 TCP connections"), "{output:?}");
    assert_eq!(agent.json(&["adopt"]).unwrap()["tcp"], 100, "a second time it is the same");
    kube_proxy.clean().unwrap();
    // The agent reads conntrack every 5 s, and follows the connections from here on.
    sleep(Duration::from_secs(7));
    let held = held.finish();
    println!("`adopt`, kube-proxy's rules removed: {held}");
    assert!(held.is_clean(), "{held}");
}

/// Back to kube-proxy: adopted connections that began under it lose nothing; connections that began
/// here are counted, for the page that documents it.
#[test]
fn back_to_kube_proxy() {
    let backend = Backend::Nftables;
    if skips("back_to_kube_proxy", backend) {
        return;
    }
    let _alone = quiet::alone();
    let takeover = Takeover::new("tc", Family::V4);
    let _kube_proxy = takeover.kube_proxy(backend);
    let earlier = takeover.start_load("back to kube-proxy, of connections that began under it");
    let mut agent = takeover.agent("tc", &["--adopt"]);
    agent.wait_said(&["adopted kube-proxy's connections"], PATIENCE).unwrap();
    let later = takeover.start_load("back to kube-proxy, of connections that began under the agent");
    agent.stop().unwrap();
    let cleanup = agent.command(&["cleanup"]).unwrap();
    assert!(cleanup.status.success(), "{cleanup:?}");
    // All meters run for this time without the agent's programs.
    sleep(Duration::from_secs(1));
    let (earlier, later) = (earlier.stop(), later.stop());
    // The pods keep answering ended connections of the other kind: their retransmissions prove
    // nothing here.
    assert_eq!((earlier.ended, earlier.datagrams), (0, 0), "{}", earlier.report);
    println!(
        "of {} connections that began under the agent {} ended; {} datagrams were lost",
        later.connections, later.broken, later.datagrams
    );
    // kube-proxy serves new connections.
    for target in takeover.outside() {
        takeover.cluster.answer(Protocol::Tcp, target).unwrap();
    }
}
