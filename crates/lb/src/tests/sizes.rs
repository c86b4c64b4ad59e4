//! A large cluster: the work grows with endpoints and Services, never with nodes times Services.

use std::fmt::Write as _;

use super::*;

const NODES: usize = 500;
const SERVICES: usize = 1_000;
const ENDPOINTS: usize = 10;

/// Returns a folder with that many objects, as `kubectl get -o json` prints them.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let list = |name: &str, items: Vec<String>| {
        let text = format!("{{\"apiVersion\":\"v1\",\"kind\":\"List\",\"items\":[{}]}}", items.join(","));
        std::fs::write(folder.path().join(name), text).unwrap();
    };
    let nodes = (0..NODES).map(|i| {
        let zone = i % 3;
        format!(
            "{{\"apiVersion\":\"v1\",\"kind\":\"Node\",\"metadata\":{{\"name\":\"node-{i}\",\
             \"labels\":{{\"topology.kubernetes.io/zone\":\"zone-{zone}\"}}}}}}"
        )
    });
    list("nodes.json", nodes.collect());
    let services = (0..SERVICES).map(|i| {
        let policy = if i % 2 == 0 { "Local" } else { "Cluster" };
        format!(
            "{{\"apiVersion\":\"v1\",\"kind\":\"Service\",\"metadata\":{{\"name\":\"s{i}\",\"namespace\":\"ns\"}},\
             \"spec\":{{\"type\":\"NodePort\",\"clusterIP\":\"10.{}.{}.{}\",\"externalTrafficPolicy\":\"{policy}\",\
             \"ports\":[{{\"port\":80,\"nodePort\":{}}}]}}}}",
            100 + i / 65_536,
            i / 256 % 256,
            i % 256,
            10_000 + i
        )
    });
    list("services.json", services.collect());
    let slices = (0..SERVICES).map(|i| {
        let mut endpoints = String::new();
        for e in 0..ENDPOINTS {
            let at = i * ENDPOINTS + e;
            let comma = if e == 0 { "" } else { "," };
            let (b, c, d) = (at / 65_536, at / 256 % 256, at % 256);
            write!(
                endpoints,
                "{comma}{{\"addresses\":[\"10.{b}.{c}.{d}\"],\"nodeName\":\"node-{}\",\"conditions\":{{\"ready\":true}}}}",
                at % NODES
            )
            .unwrap();
        }
        format!(
            "{{\"apiVersion\":\"discovery.k8s.io/v1\",\"kind\":\"EndpointSlice\",\"addressType\":\"IPv4\",\
             \"metadata\":{{\"name\":\"s{i}-1\",\"namespace\":\"ns\",\"labels\":{{\"kubernetes.io/service-name\":\"s{i}\"}}}},\
             \"ports\":[{{\"port\":8080}}],\"endpoints\":[{endpoints}]}}"
        )
    });
    list("slices.json", slices.collect());
    folder
}

#[test]
fn the_work_is_that_of_endpoints_and_services() {
    let folder = folder();
    let mut index = Index::default();
    source::read_cluster(folder.path()).unwrap().apply(&mut index);
    let cluster = Cluster::new(index);
    let judge = Judge::new(&cluster, None, Overrides::default());
    let names: Vec<_> = cluster.exposed().cloned().collect();
    assert_eq!(names.len(), SERVICES);
    let mut work = 0;
    for name in &names {
        let judgement = judge.service(name).unwrap();
        assert_eq!(judgement.ports[0].nodes(), NODES);
        assert_eq!(judgement.ports[0].pods.len(), ENDPOINTS);
        work += judgement.work;
    }
    // Each endpoint is a row and is in the lists of both policies; each Service additionally has
    // the three zones. Every node of every Service would be half a million.
    assert!(work <= SERVICES * (3 * ENDPOINTS + 3), "{work}");
}
