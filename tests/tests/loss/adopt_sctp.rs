//! Migration of SCTP from kube-proxy: associations of the kernel's own sockets that began under its
//! rules, where the kernel has SCTP (emulated machines with Debian's kernels do).

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::kube_proxy::{Backend, KubeProxy, Rules};
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::object::{Policy, Port, Service};
use traffic_policy_testing::traffic::associations::{self, Association, Server};

use crate::cluster::{self, PATIENCE, POD_PORT};

const NODE_PORT: u16 = 30080;
/// The number of associations to the node port, and to the address of a load balancer.
const EACH: usize = 4;
const BYTES: u64 = 400_000;

fn adopted(test: &str, attach: &str, family: Family) {
    let backend = Backend::Nftables;
    let missing = if associations::are_there() { None } else { Some("SCTP of the kernel") };
    if let Some(missing) = missing.or_else(|| (!backend.is_there()).then(|| backend.program())) {
        let why = format!("there is no {missing} here (`cargo xtask vm test loss::adopt_sctp`)");
        traffic_policy_testing::skipped(test, why);
        return;
    }
    let cluster = cluster::without_agents(&[1, 1], attach);
    let lab = &cluster.lab;
    let (vip, cluster_ip): (IpAddr, IpAddr) = match family {
        Family::V4 => ("198.51.100.10".parse().unwrap(), "10.96.0.10".parse().unwrap()),
        Family::V6 => ("2001:db8:51::10".parse().unwrap(), "fd00:10:96::10".parse().unwrap()),
    };
    let service = Service::new("every")
        .families(&[family])
        .policy(Policy::Cluster)
        .cluster_ip(cluster_ip)
        .vip(vip)
        .port(Port::sctp(80, POD_PORT).node_port(NODE_PORT));
    cluster.manifests.apply(&service, &cluster.backends()).unwrap();
    lab.route_vip(vip, lab.node(1)).unwrap();
    let _servers: Vec<_> = lab.pods().map(|pod| Server::start(pod, family, POD_PORT).unwrap()).collect();
    let rules = Rules {
        name: "web".to_owned(),
        protocols: vec!["sctp"],
        cluster_ip: SocketAddr::new(cluster_ip, 80),
        vip: Some(SocketAddr::new(vip, 80)),
        node_port: Some(NODE_PORT),
        endpoints: lab.pods().map(|pod| SocketAddr::new(pod.address(family), POD_PORT)).collect(),
        local: None,
    };
    let kube_proxy = KubeProxy::start(lab.node(1), family, backend, &[rules]).unwrap();

    let from = SocketAddr::new(lab.client().address(family), 0);
    let targets = [cluster.at(1, family, NODE_PORT), SocketAddr::new(vip, 80)];
    let open = |to| Association::open(lab.client().netns(), from, to).unwrap();
    let mut held: Vec<_> = targets.into_iter().cycle().take(2 * EACH).map(open).collect();
    let said: Vec<_> = held.iter_mut().map(|association| association.ask(3).unwrap()).collect();

    let mut agent = Agent::builder(lab, lab.node(1)).attach(attach).flags(&["--adopt"]).start().unwrap();
    agent.wait_said(&["adopted kube-proxy's connections"], PATIENCE).unwrap();
    agent.wait_ready(PATIENCE).unwrap();
    let left = |agent: &Agent| {
        let flows = agent.json(&["flows"]).unwrap();
        flows.as_array().unwrap().iter().filter(|flow| flow["kind"] == "conntrack").count()
    };
    assert_eq!(left(&agent), 2 * EACH);
    kube_proxy.clean().unwrap();
    agent.kill().unwrap();
    agent.start_again().unwrap();
    agent.wait_ready(PATIENCE).unwrap();
    for (association, said) in held.iter_mut().zip(&said) {
        association.burst(BYTES).unwrap();
        assert_eq!(association.ask(3).unwrap(), *said, "the same endpoint, and the same source");
    }
    assert_eq!(left(&agent), 2 * EACH);
    // The agent serves new associations.
    for to in targets {
        let mut anew = open(to);
        anew.ask(3).unwrap();
        anew.shut_down().unwrap();
    }
    assert_eq!(left(&agent), 2 * EACH);
    held.into_iter().for_each(|association| association.shut_down().unwrap());
    agent.wait_said(&["NAT is not kept any more"], Duration::from_secs(60)).unwrap();
    assert_eq!(left(&agent), 0);
}

#[test]
fn by_tc() {
    adopted("by_tc", "tc", Family::V4);
}

#[test]
fn by_xdp_ipv6() {
    adopted("by_xdp_ipv6", "xdp", Family::V6);
}
