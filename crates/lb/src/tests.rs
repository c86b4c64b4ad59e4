//! Judgements of small clusters written as tables, and of random ones in comparison with the
//! agent's own model.

mod agents;
mod outlive;
mod scene;
mod silence;
mod simulate;
mod sizes;
mod tables;
mod what_if;

use traffic_policy_cluster::{
    model::{Index, ServiceName},
    source,
};

use super::{Balancer, Cluster, Fate, Judge, Judgement, Overrides, Who, by_name};

/// Returns the manifests of a cluster with one Service `shop/web`. Nodes are given as `n1
/// n2/excluded n3/leaving`; a Service as `LoadBalancer Local`; pods as `a@n1 b@n2/terminating`.
pub(super) fn manifests(nodes: &str, service: &str, pods: &str) -> String {
    let mut text = String::new();
    for node in nodes.split_whitespace() {
        let mut words = node.split('/');
        let name = words.next().unwrap();
        let (mut labels, mut spec, mut metadata) = (String::new(), String::new(), String::new());
        let mut conditions = String::new();
        for word in words {
            match word {
                "excluded" => labels += "node.kubernetes.io/exclude-from-external-load-balancers: \"\", ",
                "spot" => labels += "cloud.google.com/gke-spot: \"true\", ",
                "leaving" => spec += "taints: [{key: ToBeDeletedByClusterAutoscaler, effect: NoSchedule}], ",
                "gce" => spec += "providerID: \"gce://project/zone/node\", ",
                "deleting" => metadata += "deletionTimestamp: \"2026-01-01T00:00:00Z\", ",
                "silent" => conditions += "{type: Ready, status: Unknown, lastHeartbeatTime: null}",
                zone => labels += &format!("topology.kubernetes.io/zone: {zone}, "),
            }
        }
        text += &format!(
            "---\napiVersion: v1\nkind: Node\nmetadata: {{name: {name}, {metadata}labels: {{{labels}}}}}\n\
             spec: {{{spec}}}\nstatus: {{conditions: [{conditions}]}}\n"
        );
    }
    let (mut kind, mut policy, mut rest, mut annotations) =
        ("LoadBalancer", "Cluster", String::new(), String::new());
    for word in service.split_whitespace() {
        match word {
            "LoadBalancer" | "NodePort" | "ClusterIP" => kind = word,
            "Local" | "Cluster" => policy = word,
            "ranges" => rest += "loadBalancerSourceRanges: [192.0.2.0/24], ",
            "affinity" => rest += "sessionAffinity: ClientIP, ",
            "weighted" => annotations += "networking.gke.io/weighted-load-balancing: pods-per-node, ",
            word if word.starts_with("alb.ingress") => {
                annotations += &format!("{}, ", word.replacen('=', ": ", 1));
            }
            other => annotations += &format!("traffic-policy.io/{}, ", other.replacen('=', ": ", 1)),
        }
    }
    let health =
        if kind == "LoadBalancer" && policy == "Local" { "healthCheckNodePort: 32080, " } else { "" };
    let node_port = if kind == "ClusterIP" { "" } else { ", nodePort: 30080" };
    let external =
        if kind == "ClusterIP" { "" } else { "externalTrafficPolicy: POLICY, " }.replace("POLICY", policy);
    text += &format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{name: web, namespace: shop, annotations: {{{annotations}}}}}\n\
         spec: {{type: {kind}, clusterIP: 10.96.0.1, {external}{health}{rest}selector: {{app: web}}, \
         ports: [{{name: http, port: 80{node_port}}}]}}\n"
    );
    let mut endpoints = String::new();
    for (at, pod) in (1..).zip(pods.split_whitespace()) {
        let mut words = pod.split('/');
        let (name, node) = words.next().unwrap().split_once('@').unwrap();
        let (mut conditions, mut hints) = ("ready: true".to_owned(), String::new());
        for word in words {
            match word {
                "terminating" => conditions = "ready: false, serving: true, terminating: true".to_owned(),
                "unready" => conditions = "ready: false, serving: false".to_owned(),
                zone => hints = format!(", hints: {{forZones: [{{name: {zone}}}]}}"),
            }
        }
        endpoints += &format!(
            "- {{addresses: [10.244.0.{at}], nodeName: {node}, conditions: {{{conditions}}}, \
             targetRef: {{kind: Pod, name: {name}}}{hints}}}\n"
        );
    }
    let endpoints =
        if endpoints.is_empty() { "endpoints: []\n".to_owned() } else { format!("endpoints:\n{endpoints}") };
    text += &format!(
        "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\n\
         metadata: {{name: web-1, namespace: shop, labels: {{kubernetes.io/service-name: web}}}}\n\
         ports: [{{name: http, port: 8080}}]\n{endpoints}"
    );
    text
}

pub(super) fn cluster(yaml: &str) -> Cluster {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a.yaml"), yaml).unwrap();
    let mut index = Index::default();
    source::read_cluster(folder.path()).unwrap_or_else(|error| panic!("{error}\n{yaml}")).apply(&mut index);
    Cluster::new(index)
}

pub(super) fn web() -> ServiceName {
    ServiceName { namespace: "shop".to_owned(), name: "web".to_owned() }
}

pub(super) fn balancer(name: &str) -> Option<&'static Balancer> {
    (name != "guess").then(|| by_name(name).unwrap())
}

/// Formats one line for each row: nodes, pods, answer, traffic, outcome, share in percent; and one
/// for each pod.
fn table(judge: &Judge<'_>, judgement: &Judgement<'_>) -> String {
    let mut lines = Vec::new();
    for port in &judgement.ports {
        for row in &port.rows {
            let names = match row.who {
                Who::Node(name) => name.to_owned(),
                Who::Others(_) => judge.names(port, row, row.count).join(","),
            };
            let fate = match row.fate {
                Fate::Served { here, of } => format!("{here}/{of}"),
                Fate::Dropped => "dropped".to_owned(),
                Fate::Refused => "refused".to_owned(),
            };
            let traffic = if row.takes { "yes" } else { "no" };
            lines.push(format!(
                "{names} {} {:?} {traffic} {fate} {:.0}",
                row.pods,
                row.answer,
                row.share * 100.0
            ));
        }
        for pod in &port.pods {
            lines.push(format!("  {} {:.0}", pod.label(), pod.share * 100.0));
        }
    }
    lines.join("\n")
}

fn codes(judgement: &Judgement<'_>) -> Vec<String> {
    judgement.findings.iter().map(|finding| format!("{} {}", finding.level.name(), finding.code)).collect()
}

fn judged<T>(yaml: &str, name: &str, look: impl FnOnce(&Judge<'_>, &Judgement<'_>) -> T) -> T {
    let cluster = cluster(yaml);
    let judge = Judge::new(&cluster, balancer(name), Overrides::default());
    let judgement = judge.service(&web()).expect("it is reached from outside");
    look(&judge, &judgement)
}
