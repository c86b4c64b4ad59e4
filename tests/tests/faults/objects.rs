//! Objects that no API server would admit, or that contradict each other, one after the other
//! beside a Service that works.

use std::fs;
use std::time::Duration;

use serde_json::json;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Backend, Policy, Service};
use traffic_policy_testing::pace::until;
use traffic_policy_testing::traffic::Outcome;

const GOOD: u16 = 30080;
const ODD: u16 = 30081;
const SOON: Duration = Duration::from_secs(10);

#[test]
fn nonsense_contradictions_and_manifests_that_are_not_read() {
    let cluster = Cluster::start(Lab::builder().pods(&[2])).unwrap();
    cluster.manifests.apply(&Cluster::node_port("good", Policy::Cluster, GOOD), &cluster.backends()).unwrap();
    let agent = Agent::start_all(&cluster.lab, |agent| agent.attach("xdp")).unwrap().remove(0);
    nonsense_addresses(&cluster, &agent);
    endpoints_of_the_wrong_family(&cluster, &agent);
    two_services_on_one_node_port(&cluster, &agent);
    the_folder_of_manifests_goes_away(&cluster, &agent);
    a_broken_manifest_at_run_time(&cluster, &agent);
}

fn good(cluster: &Cluster) {
    for family in Family::BOTH {
        for protocol in Protocol::BOTH {
            cluster.answer(protocol, cluster.at(1, family, GOOD)).unwrap();
        }
    }
}

fn answered(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Answered(_))
}

/// Deletes the Service that has the node port, which the next case uses.
fn delete(cluster: &Cluster, service: &Service) {
    cluster.manifests.delete(service).unwrap();
    let to = cluster.at(1, Family::V4, ODD);
    cluster.wait_for(Protocol::Tcp, to, SOON, |outcome| !answered(outcome)).unwrap();
}

/// Waits until the agent has said for the `times`th time that it reads all manifests.
fn wait_readable(agent: &Agent, times: usize) {
    until("readable manifests", SOON, || {
        agent.log().matches("all manifests are readable again").count() == times
    });
}

fn nonsense_addresses(cluster: &Cluster, agent: &Agent) {
    let odd = Cluster::node_port("odd", Policy::Cluster, ODD)
        .spec("externalIPs", json!(["300.1.1.1", "127.0.0.1", "224.0.0.5", "not an address"]))
        .spec("externalTrafficPolicy", json!("Cluster"));
    cluster.manifests.apply(&odd, &cluster.backends()).unwrap();
    for wrong in ["300.1.1.1", "127.0.0.1", "224.0.0.5", "not an address"] {
        agent.wait_said(&["Service default/odd", "spec.externalIPs", wrong, "left out"], SOON).unwrap();
    }
    // Its other addresses work.
    cluster.wait_for(Protocol::Tcp, cluster.at(1, Family::V4, ODD), SOON, answered).unwrap();
    good(cluster);
    delete(cluster, &odd);
}

fn endpoints_of_the_wrong_family(cluster: &Cluster, agent: &Agent) {
    let odd = Cluster::node_port("odd", Policy::Cluster, ODD);
    let (first, second) = (cluster.lab.node(1).pod(1), cluster.lab.node(1).pod(2));
    let mut slices = odd.slices(&[Backend::of(first), Backend::of(second)]);
    // In the IPv4 slice the first endpoint has an IPv6 address, and another has none at all.
    let endpoints = slices[0]["endpoints"].as_array_mut().unwrap();
    endpoints[0]["addresses"] = json!([first.addresses.v6]);
    endpoints.push(json!({"addresses": ["nonsense"], "nodeName": "node-1"}));
    cluster.manifests.write("endpoints-default-odd", &slices).unwrap();
    cluster.manifests.service(&odd).unwrap();
    let address = first.addresses.v6.to_string();
    agent.wait_said(&["EndpointSlice default/odd-v4", "endpoints[0]", &address, "IPv4"], SOON).unwrap();
    agent.wait_said(&["EndpointSlice default/odd-v4", "endpoints[2]", "nonsense"], SOON).unwrap();
    cluster.wait_for(Protocol::Tcp, cluster.at(1, Family::V4, ODD), SOON, answered).unwrap();
    for _ in 0..6 {
        assert_eq!(cluster.answer(Protocol::Tcp, cluster.at(1, Family::V4, ODD)).unwrap().pod, second.name);
    }
    cluster.ask_until_all(Protocol::Tcp, cluster.at(1, Family::V6, ODD), &["pod-1-1", "pod-1-2"]).unwrap();
    good(cluster);
    delete(cluster, &odd);
}

fn two_services_on_one_node_port(cluster: &Cluster, agent: &Agent) {
    let backends = cluster.backends();
    let write = |name: &str, created: &str, backend: &Backend| {
        let service = Cluster::node_port(name, Policy::Cluster, ODD);
        let mut object = service.object();
        object["metadata"]["creationTimestamp"] = created.into();
        cluster.manifests.endpoints(&service, std::slice::from_ref(backend)).unwrap();
        cluster.manifests.write(&format!("service-default-{name}"), &[object]).unwrap();
        service
    };
    let to = Family::BOTH.map(|family| cluster.at(1, family, ODD));
    let all_by = |pod: &str| {
        for to in to {
            for protocol in Protocol::BOTH {
                let by_it =
                    |outcome: &Outcome| matches!(outcome, Outcome::Answered(answer) if answer.pod == pod);
                cluster.wait_for(protocol, to, SOON, by_it).unwrap();
                (0..4).for_each(|_| assert_eq!(cluster.answer(protocol, to).unwrap().pod, pod));
            }
        }
    };
    write("younger", "2026-02-02T00:00:00Z", &backends[0]);
    all_by("pod-1-1");
    // The older Service gets it, whichever this agent saw first.
    let older = write("older", "2026-01-01T00:00:00Z", &backends[1]);
    let texts = ["Service default/younger does not get node port 30081/", "Service default/older has it"];
    agent.wait_said(&texts, SOON).unwrap();
    all_by("pod-1-2");
    // The port returns to the other Service when the older one is deleted.
    cluster.manifests.delete(&older).unwrap();
    all_by("pod-1-1");
    good(cluster);
}

/// The good Service has no endpoint afterwards.
fn a_broken_manifest_at_run_time(cluster: &Cluster, agent: &Agent) {
    let path = cluster.manifests.folder().join("service-default-good.yaml");
    let intact = fs::read_to_string(&path).unwrap();
    for (name, text, said) in [
        ("no YAML", "kind: [".to_owned(), &["broken.yaml", "document 1"][..]),
        (
            "a wrong field",
            format!(
                "{}---\n{}",
                intact.replace("name: good", "name: other"),
                intact.replace("port: 80\n", "port: eighty\n")
            ),
            &["broken.yaml", "document 2", "spec.ports[0].port"],
        ),
        (
            "an unknown policy",
            intact.replace("externalTrafficPolicy: Cluster", "externalTrafficPolicy: Sometimes"),
            &["broken.yaml", "document 1", "spec.externalTrafficPolicy", "Sometimes", "Cluster or Local"],
        ),
    ] {
        cluster.manifests.write_text("broken", &text).unwrap();
        // Together with a change that must not be applied while another file is broken.
        cluster.manifests.endpoints(&Cluster::node_port("good", Policy::Cluster, GOOD), &[]).unwrap();
        let mut texts = said.to_vec();
        texts.push("last good state stays");
        agent.wait_said(&texts, SOON).unwrap_or_else(|error| panic!("{name}: {error:#}"));
        good(cluster);
        assert_eq!(agent.healthz().unwrap().status, 200, "{name}");
        cluster
            .manifests
            .endpoints(&Cluster::node_port("good", Policy::Cluster, GOOD), &cluster.backends())
            .unwrap();
    }
    fs::remove_file(cluster.manifests.folder().join("broken.yaml")).unwrap();
    wait_readable(agent, 2);
    cluster.manifests.endpoints(&Cluster::node_port("good", Policy::Cluster, GOOD), &[]).unwrap();
    cluster
        .wait_for(Protocol::Tcp, cluster.at(1, Family::V4, GOOD), SOON, Outcome::is_refused_at_once)
        .unwrap();
}

fn the_folder_of_manifests_goes_away(cluster: &Cluster, agent: &Agent) {
    let (folder, aside) = (cluster.manifests.folder().to_owned(), cluster.lab.logs().join("aside"));
    fs::rename(&folder, &aside).unwrap();
    agent.wait_said(&["manifests", "last good state stays"], SOON).unwrap();
    good(cluster);
    fs::rename(&aside, &folder).unwrap();
    wait_readable(agent, 1);
    good(cluster);
}
