//! Three nodes that follow a real kube-apiserver, where `KUBEBUILDER_ASSETS` names one: a black-box
//! test.

use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Service as ServiceObject};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::json;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::lab::{Family, Lab, plan};
use traffic_policy_testing::object::{Backend, Policy, Port, Service, node};
use traffic_policy_testing::real_api_server::RealApiServer;
use traffic_policy_testing::traffic::{Ledger, Probe, Server};

use crate::black_box::{POD_PORT, check_cluster, check_health, check_local};

const CLUSTER: u16 = 30080;
const LOCAL: u16 = 30081;
const HEALTH: u16 = 32_000;
const PODS: [&str; 2] = ["pod-1-1", "pod-2-1"];

fn web(name: &str, port: u16) -> Service {
    let ports = [Port::tcp(80, POD_PORT), Port::udp(80, POD_PORT)];
    ports.into_iter().fold(Service::new(name), |service, each| service.port(each.node_port(port)))
}

/// The virtual addresses of the Service with policy Local.
fn vips() -> [IpAddr; 2] {
    ["203.0.113.10".parse().unwrap(), "2001:db8:53::10".parse().unwrap()]
}

/// Makes the changes of users and controllers through the API. Called inside the router's
/// namespace.
async fn apply(server: &RealApiServer, lab: &Lab) {
    let admin = server.admin().unwrap();
    let parameters = PatchParams::apply("tests").force();
    let nodes: Api<Node> = Api::all(admin.clone());
    for each in lab.nodes() {
        // Server-side apply is not used: it treats two addresses of one type as the same entry, and
        // refuses them. A status in a new object may be ignored.
        let mut object = node::object(each);
        let addresses = object["status"]["addresses"].take();
        object.as_object_mut().unwrap().remove("status");
        nodes.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
        let status = json!({"status": {"addresses": addresses}});
        let written = nodes.patch_status(&each.name, &PatchParams::default(), &Patch::Merge(status)).await;
        let found = written.unwrap().status.and_then(|status| status.addresses).unwrap_or_default();
        assert_eq!(found.len(), 3, "{}: one address of each family and a name: {found:?}", each.name);
    }
    let services: Api<ServiceObject> = Api::namespaced(admin.clone(), "default");
    let slices: Api<EndpointSlice> = Api::namespaced(admin, "default");
    let backends: Vec<_> = lab.pods().map(Backend::of).collect();
    let local = web("local", LOCAL).policy(Policy::Local).health_port(HEALTH);
    for service in [web("cluster", CLUSTER), local] {
        for slice in service.slices(&backends) {
            let name = slice["metadata"]["name"].as_str().unwrap();
            slices.patch(name, &parameters, &Patch::Apply(&slice)).await.unwrap();
        }
        services.patch(service.name(), &parameters, &Patch::Apply(&service.object())).await.unwrap();
    }
    let ingress: Vec<_> = vips().iter().map(|vip| json!({"ip": vip, "ipMode": "VIP"})).collect();
    let status = json!({"status": {"loadBalancer": {"ingress": ingress}}});
    services.patch_status("local", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
}

fn check_vips(lab: &Lab) {
    for (vip, family) in vips().into_iter().zip(Family::BOTH) {
        for node in &lab.nodes()[..2] {
            lab.route_vip(vip, node).unwrap();
            for probe in [Probe::tcp(SocketAddr::new(vip, 80)), Probe::udp(SocketAddr::new(vip, 80))] {
                let answer = probe.answer(lab.client().netns()).unwrap();
                assert_eq!(answer.node, node.name, "{vip}");
                assert_eq!(answer.client.ip(), lab.client().address(family), "{vip}");
            }
            lab.unroute_vip(vip).unwrap();
        }
    }
}

#[test]
fn three_nodes_follow_a_real_api_server() {
    let lab = Lab::builder().pods(&[1, 1, 0]).build().unwrap();
    let address = plan::gateway(0).of(Family::V4);
    let server =
        lab.router().block_on(async || RealApiServer::start_in(lab.router(), address).await).unwrap();
    let Some(server) = server else {
        // Written to stderr directly, past the test harness: a skipped test must be seen.
        let skipped = "SKIPPED three_nodes_follow_a_real_api_server: KUBEBUILDER_ASSETS is not set";
        writeln!(std::io::stderr(), "{skipped}").unwrap();
        return;
    };
    lab.router().block_on(async || apply(&server, &lab).await);
    let kubeconfig = lab.logs().join("kubeconfig");
    server.write_kubeconfig(&kubeconfig).unwrap();
    let ledger = Ledger::default();
    let _servers: Vec<_> = lab.pods().map(|pod| Server::start(pod, POD_PORT, &ledger).unwrap()).collect();
    for attach in ["tc", "xdp"] {
        // The second round takes over the state of the first one, in the other mode.
        let start = |node| Agent::builder(&lab, node).attach(attach).kubeconfig(&kubeconfig).start().unwrap();
        let agents: Vec<_> = lab.nodes().iter().map(start).collect();
        agents.iter().for_each(|agent| agent.wait_ready(Duration::from_secs(60)).unwrap());
        check_cluster(&lab, CLUSTER, &PODS);
        check_local(&lab, LOCAL);
        check_health(&lab, HEALTH);
        check_vips(&lab);
    }
}
