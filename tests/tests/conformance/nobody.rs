//! Addresses and ports that no Service has, next to those of a Service; and Services that are not
//! for this proxy.

use serde_json::{Value, json};
use traffic_policy_testing::rows;
use traffic_policy_testing::{
    lab::Family,
    object::{Port, Service},
};

use super::{
    deviations::{Origin, To},
    explain::{Fate, Flow, differences},
    topology::{self, Folder, PORT, TARGET},
};

const CIDRS: [&str; 2] = ["172.30.0.0/16", "fd00:10:96::/112"];
/// A number that no Service has.
const FREE: u16 = 200;

fn web() -> Service {
    topology::service(1).port(Port::tcp(PORT, TARGET).named("web").node_port(topology::node_port(1)))
}

/// Flows to addresses and ports next to those of `web`, from every origin. `free` is the expected
/// result for those to an unallocated ClusterIP.
fn flows(free: &Fate) -> Vec<(Flow, Fate)> {
    let mut flows = Vec::new();
    for family in Family::BOTH {
        for (source, src, origin) in topology::sources(family) {
            let mut flow = |what: &str, dst: std::net::SocketAddr, protocol: &str, fate: &Fate| {
                flows.push((Flow::new(format!("{source} to {what}"), src, dst, protocol), fate.clone()));
            };
            let at = |to| topology::address(1, family, to);
            let other_port = |to| (at(to).ip(), PORT + 1).into();
            // Known addresses: every port of a ClusterIP is the Service's; of the others only the
            // ports that the Service names.
            flow("another port of a ClusterIP", other_port(To::ClusterIp), "TCP", &Fate::Reject);
            flow("a ClusterIP by another protocol", at(To::ClusterIp), "UDP", &Fate::Reject);
            let number_of_node_port = (at(To::ClusterIp).ip(), topology::node_port(1)).into();
            flow("the node port's number on a ClusterIP", number_of_node_port, "TCP", &Fate::Reject);
            for to in [To::LoadBalancer, To::ExternalIp] {
                flow(&format!("another port of {to:?}"), other_port(to), "TCP", &Fate::Unhandled);
                flow(&format!("{to:?} by another protocol"), at(to), "UDP", &Fate::Unhandled);
            }
            flow("a node port by another protocol", at(To::NodePort), "UDP", &Fate::Unhandled);
            let node_port = topology::address(2, family, To::NodePort);
            flow("a node port that nobody has", node_port, "TCP", &Fate::Unhandled);
            let service_port = (topology::primary(family), PORT).into();
            flow("the Service's port on the node", service_port, "TCP", &Fate::Unhandled);
            let endpoint = topology::endpoint_address(family, 1, 1);
            flow("an endpoint itself", endpoint, "TCP", &Fate::Unhandled);
            let free_address = topology::address(FREE, family, To::ClusterIp);
            flow("a ClusterIP that nobody has", free_address, "TCP", free);
            flow("a ClusterIP that nobody has", free_address, "UDP", free);
            // The kernel runs no cgroup program in the calls of SCTP sockets.
            let fate = if origin == Origin::External { Fate::Reject } else { Fate::Unhandled };
            flow("a ClusterIP by SCTP", at(To::ClusterIp), "SCTP", &fate);
        }
    }
    flows
}

fn objects() -> Vec<Value> {
    vec![web().object()]
}

fn agrees(folder: &Folder, options: &[&str], free: &Fate) {
    let flows = flows(free);
    let wrong = differences(folder.path(), &topology::options(options), &flows);
    assert!(wrong.is_empty(), "{} of {} flows:\n{}", wrong.len(), flows.len(), wrong.join("\n"));
}

rows! {
    fn beside_a_service() = agrees(&Folder::new(&objects()), &[], &Fate::Unhandled);
    fn beside_a_service_with_service_cidrs() =
        agrees(&Folder::new(&objects()).with_service_cidrs(&CIDRS), &[], &Fate::Drop);
    fn beside_a_service_with_service_cidrs_by_option() =
        agrees(&Folder::new(&objects()), &["--service-cidr", &CIDRS.join(",")], &Fate::Drop);
}

#[test]
fn services_of_others_are_left_alone() {
    let port = |number: u16| Port::tcp(PORT, TARGET).named("web").node_port(topology::node_port(number));
    let mut objects: Vec<Value> =
        (1..=4).map(|number| topology::service(number).port(port(number)).object()).collect();
    objects[0]["metadata"]["labels"] = json!({"service.kubernetes.io/service-proxy-name": "mesh"});
    objects[1]["metadata"]["labels"] = json!({"service.kubernetes.io/headless": ""});
    objects[2]["spec"]["clusterIP"] = json!("None");
    objects[2]["spec"]["clusterIPs"] = json!(["None"]);
    objects[3]["spec"]["type"] = json!("ExternalName");
    objects[3]["spec"]["externalName"] = json!("example.com");
    let mut flows = Vec::new();
    for number in 1..=4 {
        for family in Family::BOTH {
            for (source, src, _) in topology::sources(family) {
                for to in [To::ClusterIp, To::NodePort, To::LoadBalancer, To::ExternalIp] {
                    let name = format!("{source} to {to:?} of Service {number}");
                    let flow = Flow::new(name, src, topology::address(number, family, to), "TCP");
                    flows.push((flow, Fate::Unhandled));
                }
            }
        }
    }
    let folder = Folder::new(&objects);
    let wrong = differences(folder.path(), &topology::options(&[]), &flows);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A port that cannot be served leaves the address known.
#[test]
fn a_cluster_ip_without_a_port_that_is_served() {
    let mut object = web().object();
    object["spec"]["ports"][0]["protocol"] = json!("QUIC");
    let folder = Folder::new(&[object]);
    let flows: Vec<_> = Family::BOTH
        .into_iter()
        .flat_map(|family| {
            let at = topology::address(1, family, To::ClusterIp);
            topology::sources(family).map(|(source, src, _)| {
                (Flow::new(format!("{source} to a ClusterIP for QUIC only"), src, at, "TCP"), Fate::Reject)
            })
        })
        .collect();
    let wrong = differences(folder.path(), &topology::options(&[]), &flows);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
