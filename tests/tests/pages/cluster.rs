//! Manifests of clusters with one Service, `shop/web`.

use std::fmt::Write as _;

pub struct Cluster<'c> {
    pub nodes: Vec<String>,
    pub policy: &'c str,
    /// The drain annotation of the Service.
    pub drain: &'c str,
    /// The names and nodes of pods, and whether they are ready; otherwise they terminate.
    pub pods: Vec<(String, String, bool)>,
}

impl Cluster<'_> {
    pub fn manifests(&self) -> String {
        let mut text = String::new();
        for node in &self.nodes {
            writeln!(text, "---\napiVersion: v1\nkind: Node\nmetadata: {{name: {node:?}}}").ok();
        }
        let health = if self.policy == "Local" { "healthCheckNodePort: 32080, " } else { "" };
        writeln!(
            text,
            "---\napiVersion: v1\nkind: Service\n\
             metadata: {{name: web, namespace: shop, annotations: {{traffic-policy.io/drain: {:?}}}}}\n\
             spec: {{type: LoadBalancer, clusterIP: 10.96.0.1, externalTrafficPolicy: {}, {health}selector: {{app: web}}, \
             ports: [{{name: http, port: 80, nodePort: 30080}}]}}\n\
             ---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\n\
             metadata: {{name: web-1, namespace: shop, labels: {{kubernetes.io/service-name: web}}}}\n\
             ports: [{{name: http, port: 8080}}]\nendpoints:",
            self.drain, self.policy
        )
        .ok();
        for (at, (pod, node, ready)) in self.pods.iter().enumerate() {
            let terminating = !ready;
            writeln!(
                text,
                "- {{addresses: [10.244.{}.{}], nodeName: {node:?}, targetRef: {{kind: Pod, name: {pod:?}}}, \
                 conditions: {{ready: {ready}, serving: true, terminating: {terminating}}}}}",
                at / 250,
                at % 250 + 1
            )
            .ok();
        }
        if self.pods.is_empty() {
            text = text.trim_end().to_owned() + " []\n";
        }
        text
    }
}

/// A cluster with some nodes, and pods on some of them.
pub fn cluster<'c>(nodes: &[&str], policy: &'c str, pods: &[(&str, &str)]) -> Cluster<'c> {
    Cluster {
        nodes: nodes.iter().map(|node| (*node).to_owned()).collect(),
        policy,
        drain: "60s",
        pods: pods.iter().map(|(pod, node)| ((*pod).to_owned(), (*node).to_owned(), true)).collect(),
    }
}
