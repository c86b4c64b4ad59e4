//! The judgement of `lb` on a node agrees with the behaviour of an agent on that node.

use std::collections::BTreeSet;

use proptest::prelude::*;
use traffic_policy_cluster::model::{
    FrontendKind, Index, NodeInput, Policy, Protocol, ServiceName,
    object::{EndpointSlice, Node, Port, Service, ServiceType, SliceEndpoint, SlicePort},
};
use traffic_policy_dataplane::sync::frontend;
use traffic_policy_ebpf::abi::frontend::LOCAL;
use traffic_policy_lb::{Cluster, Fate, Judge, Overrides, PROFILES, Who, by_name};

const NODES: [&str; 4] = ["n0", "n1", "n2", "n3"];
const ZONES: [&str; 2] = ["east", "west"];

/// An endpoint in the first or second slice: addresses are repeated on purpose, as when endpoints
/// move between slices.
fn endpoint() -> impl Strategy<Value = (bool, SliceEndpoint)> {
    let node = prop::option::of(prop::sample::select(&NODES[..]));
    let zones = prop::collection::vec(prop::sample::select(&ZONES[..]), 0..3);
    let nodes = prop::collection::vec(prop::sample::select(&NODES[..]), 0..2);
    (any::<bool>(), 1u8..7, node, any::<[bool; 3]>(), zones, nodes).prop_map(
        |(second, last, node, [ready, serving, terminating], zones, nodes)| {
            let endpoint = SliceEndpoint {
                address: [10, 244, 0, last].into(),
                node_name: node.map(Into::into),
                ready,
                serving,
                terminating,
                for_zones: zones.into_iter().map(Into::into).collect(),
                for_nodes: nodes.into_iter().map(Into::into).collect(),
                pod: None,
            };
            (second, endpoint)
        },
    )
}

fn web() -> ServiceName {
    ServiceName { namespace: "shop".to_owned(), name: "web".to_owned() }
}

fn service() -> impl Strategy<Value = Service> {
    let policy = prop_oneof![Just(Policy::Cluster), Just(Policy::Local)];
    (policy, any::<bool>(), any::<bool>()).prop_map(|(external_policy, node_port, external_fallback)| {
        Service {
            service_type: if node_port { ServiceType::NodePort } else { ServiceType::LoadBalancer },
            cluster_ips: vec![[10, 96, 0, 1].into()],
            ipv4: true,
            load_balancer_ips: if node_port { Vec::new() } else { vec![[203, 0, 113, 1].into()] },
            ports: vec![Port { name: String::new(), protocol: Protocol::Tcp, port: 80, node_port: 30_080 }],
            external_policy,
            health_check_node_port: if node_port { 0 } else { 32_080 },
            health_annotation: if node_port { 31_999 } else { 0 },
            external_fallback,
            ..Service::unserved(web())
        }
    })
}

/// `n3` is not a Node: endpoints may still name it.
fn objects(service: Service, endpoints: &[(bool, SliceEndpoint)], zones: [Option<usize>; 3]) -> Index {
    let mut index = Index::default();
    for (name, zone) in NODES.iter().zip(zones) {
        index.apply(Node {
            name: (*name).to_owned(),
            addresses: vec![[192, 0, 2, 1].into()],
            zone: zone.map(|zone| ZONES[zone].to_owned()),
            ..Node::default()
        });
    }
    index.apply(service);
    for second in [false, true] {
        let name = if second { "web-2" } else { "web-1" };
        index.apply(EndpointSlice {
            name: ServiceName { namespace: "shop".to_owned(), name: name.to_owned() },
            service: "web".to_owned(),
            ports: vec![SlicePort { name: String::new(), protocol: Protocol::Tcp, port: 8080 }],
            endpoints: endpoints.iter().filter(|(at, _)| *at == second).map(|(_, e)| e.clone()).collect(),
            ..EndpointSlice::default()
        });
    }
    index
}

proptest! {
    #[test]
    fn each_node_does_what_is_judged_of_it(
        service in service(),
        endpoints in prop::collection::vec(endpoint(), 0..10),
        zones in any::<[bool; 3]>().prop_map(|zones| zones.map(usize::from).map(Some)),
        unzoned in 0usize..4,
    ) {
        let mut zones = zones;
        if let Some(zone) = zones.get_mut(unzoned) {
            *zone = None;
        }
        let service_falls_back = service.external_fallback;
        let index = objects(service, &endpoints, zones);
        let cluster = Cluster::new(index.clone());
        let judge = Judge::new(&cluster, by_name("gke"), Overrides::default());
        let judgement = judge.service(&web()).unwrap();
        let port = &judgement.ports[0];
        let reach = cluster.index().reach(&web()).unwrap();
        let everywhere = &reach.ports[0].1;
        for name in NODES {
            // The agent on that node.
            let mut agent = index.clone();
            let input = NodeInput {
                node_name: name.to_owned(),
                node_port_addresses: vec![[192, 0, 2, 1].into()],
                ipv4: true,
                ..NodeInput::default()
            };
            let _ = agent.update(&input);
            let (_, written) = agent.desired().ports.iter().next().unwrap();
            let zone = agent.nodes().find(|node| node.name == name).and_then(|node| node.zone.clone());

            let addresses = |list| -> BTreeSet<_> {
                everywhere.list(list).iter().map(|place| place.address).collect()
            };
            let theirs = |list: &[traffic_policy_cluster::model::Endpoint]| -> BTreeSet<_> {
                list.iter().map(|endpoint| endpoint.address).collect()
            };
            prop_assert_eq!(addresses(everywhere.cluster(name, zone.as_deref())), theirs(&written.cluster), "{}", name);
            if written.external_policy == Policy::Local {
                prop_assert_eq!(addresses(everywhere.local(name)), theirs(&written.local), "{}", name);
            }

            let row = port.rows.iter().find(|row| match row.who {
                Who::Node(node) => node == name,
                Who::Others(_) => judge.names(port, row, row.count).contains(&name),
            });
            // No endpoint, no hint and no Node names it.
            let Some(row) = row else {
                prop_assert_eq!(name, "n3");
                continue;
            };
            // The flags as the packet path reads them.
            let flags = frontend::flags(written, FrontendKind::NodePort, true, false);
            let list = if flags & LOCAL == 0 { &written.cluster } else { &written.local };
            prop_assert!(flags & LOCAL != 0 || written.external_policy == Policy::Cluster || service_falls_back);
            let expected = match list.len() {
                0 if written.has_endpoints => Fate::Dropped,
                0 => Fate::Refused,
                of => Fate::Served { here: list.iter().filter(|endpoint| endpoint.local).count(), of },
            };
            prop_assert_eq!(row.fate, expected, "{}", name);
            let health = agent.desired().health.values().next().map(|health| health.local_endpoints);
            prop_assert_eq!(reach.health.as_ref().map(|health| health.local_endpoints(name)), health);
        }
    }

    #[test]
    fn shares_add_up_and_no_request_is_both_answered_and_lost(
        service in service(),
        endpoints in prop::collection::vec(endpoint(), 0..10),
        balancer in prop::sample::select(PROFILES.map(|balancer| balancer.name).to_vec()),
    ) {
        let cluster = Cluster::new(objects(service, &endpoints, [Some(0), Some(1), None]));
        let judge = Judge::new(&cluster, by_name(balancer), Overrides::default());
        let judgement = judge.service(&web()).unwrap();
        let port = &judgement.ports[0];
        let nodes: f64 = port.rows.iter().map(|row| row.share).sum();
        let expected = if port.taking() > 0 { 1.0 } else { 0.0 };
        prop_assert!((nodes - expected).abs() < 1e-9, "{:?}", port.rows);
        let answered: f64 = port.pods.iter().map(|pod| pod.share).sum();
        prop_assert!((answered + port.lost - expected).abs() < 1e-9, "{:?}", port.rows);
        prop_assert!(port.rows.iter().all(|row| row.takes || row.share == 0.0));
        prop_assert_eq!(port.nodes(), port.rows.iter().map(|row| row.count).sum::<usize>());
    }
}
