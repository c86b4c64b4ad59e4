//! Small clusters: the answer and behaviour of each node, the share of each pod, and the findings.

use super::*;

/// Nodes, Service, pods and balancer; then the expected table and findings.
struct Case {
    nodes: &'static str,
    service: &'static str,
    pods: &'static str,
    balancer: &'static str,
    table: &'static str,
    findings: &'static [&'static str],
}

const CASES: [Case; 24] = [
    Case {
        nodes: "n1 n2 n3",
        service: "LoadBalancer Cluster",
        pods: "a@n1 b@n2",
        balancer: "gke",
        table: "n1 1 Ok(None) yes 1/2 33\nn2 1 Ok(None) yes 1/2 33\nn3 0 Ok(None) yes 0/2 33\n  a 50\n  b 50",
        findings: &["warning healthy-without-pod", "note short-drain"],
    },
    Case {
        nodes: "n1 n2 n3",
        service: "LoadBalancer Local",
        pods: "a@n1 b@n2 c@n2",
        balancer: "gke",
        table: "n1 1 Ok(Some(1)) yes 1/1 50\nn2 2 Ok(Some(2)) yes 2/2 50\nn3 0 Unavailable no dropped 0\n  a 50\n  b 25\n  c 25",
        findings: &["warning uneven"],
    },
    Case {
        nodes: "n1 n2 n3",
        service: "LoadBalancer Local weighted",
        pods: "a@n1 b@n2 c@n2",
        balancer: "gke",
        table: "n1 1 Ok(Some(1)) yes 1/1 33\nn2 2 Ok(Some(2)) yes 2/2 67\nn3 0 Unavailable no dropped 0\n  a 33\n  b 33\n  c 33",
        findings: &[],
    },
    // The second story: a node port with policy Local behind an ALB.
    Case {
        nodes: "n1 n2",
        service: "NodePort Local",
        pods: "a@n1",
        balancer: "aws-alb",
        table: "n1 1 Open yes 1/1 100\nn2 0 Silence no dropped 0\n  a 100",
        findings: &["warning check-times-out", "note one-node"],
    },
    // All are unhealthy: an NLB sends to all of them.
    Case {
        nodes: "n1/excluded n2 n3",
        service: "LoadBalancer Local",
        pods: "a@n1",
        balancer: "aws-nlb",
        table: "n1 1 Ok(Some(1)) no 1/1 0\nn2,n3 0 Unavailable yes dropped 100\n  a 0",
        findings: &["error nobody-healthy", "note one-node"],
    },
    Case {
        nodes: "n1 n2",
        service: "LoadBalancer Local",
        pods: "",
        balancer: "azure",
        table: "n1,n2 0 Unavailable no refused 0",
        findings: &["error no-endpoint"],
    },
    Case {
        nodes: "n1 n2",
        service: "LoadBalancer Cluster",
        pods: "a@n1/unready",
        balancer: "gke",
        table: "n1 0 Ok(None) yes refused 50\nn2 0 Ok(None) yes refused 50",
        findings: &["error no-endpoint", "note short-drain"],
    },
    // Only a terminating pod is left: the health port answers 503, and requests that arrive are
    // still served.
    Case {
        nodes: "n1 n2",
        service: "LoadBalancer Local",
        pods: "a@n1/terminating b@n2",
        balancer: "gke",
        table: "n1 0 Unavailable no 1/1 0\nn2 1 Ok(Some(1)) yes 1/1 100\n  a 0\n  b 100",
        findings: &["note one-node"],
    },
    Case {
        nodes: "n1 n2/leaving n3/deleting",
        service: "LoadBalancer Cluster",
        pods: "a@n1 b@n2",
        balancer: "gke",
        table: "n1 1 Ok(None) yes 1/2 100\nn2 1 Unavailable no 1/2 0\nn3 0 Unavailable no 0/2 0\n  a 50\n  b 50",
        findings: &["note unhealthy-with-pod", "note leaving", "note short-drain"],
    },
    Case {
        nodes: "n1/excluded n2",
        service: "LoadBalancer Local",
        pods: "a@n1 b@n2",
        balancer: "gke",
        table: "n1 1 Ok(Some(1)) no 1/1 0\nn2 1 Ok(Some(1)) yes 1/1 100\n  a 0\n  b 100",
        findings: &["warning unhealthy-with-pod", "warning uneven"],
    },
    // Zones: each node uses the endpoints with a hint for its own zone.
    Case {
        nodes: "n1/east n2/west n3/west",
        service: "LoadBalancer Cluster",
        pods: "a@n1/east b@n2/west",
        balancer: "cloud-provider-kind",
        table: "n1 1 Ok(None) yes 1/1 33\nn2 1 Ok(None) yes 1/1 33\nn3 0 Ok(None) yes 0/1 33\n  a 33\n  b 67",
        findings: &["warning healthy-without-pod", "note uneven"],
    },
    Case {
        nodes: "n1 n2",
        service: "LoadBalancer Cluster ranges",
        pods: "a@n1 b@n2",
        balancer: "haproxy",
        table: "n1 1 Ok(None) yes 1/2 50\nn2 1 Ok(None) yes 1/2 50\n  a 50\n  b 50",
        findings: &["warning source-ranges-see-the-balancer"],
    },
    Case {
        nodes: "n1/silent n2",
        service: "LoadBalancer Cluster drain=90s",
        pods: "a@n2 b@n2",
        balancer: "custom",
        table: "n2 2 Ok(None) yes 2/2 100\nn1 0 Silence no 0/2 0\n  a 50\n  b 50",
        findings: &["warning one-node", "note silent-node"],
    },
    Case {
        nodes: "n1 n2 n3",
        service: "LoadBalancer Local",
        pods: "a@n1 b@n2",
        balancer: "metallb-l2",
        table: "n1 1 Announced yes 1/1 50\nn2 1 Announced yes 1/1 50\nn3 0 NotAnnounced no dropped 0\n  a 50\n  b 50",
        findings: &["note one-node-at-a-time"],
    },
    // A Service of type NodePort with a health port by annotation, which an ALB is assumed to
    // check, ...
    Case {
        nodes: "n1 n2 n3",
        service: "NodePort Local health-check-node-port=\"31999\"",
        pods: "a@n1 b@n2",
        balancer: "aws-alb",
        table: "n1 1 Ok(Some(1)) yes 1/1 50\nn2 1 Ok(Some(1)) yes 1/1 50\nn3 0 Unavailable no dropped 0\n  a 50\n  b 50",
        findings: &["note health-port-assumed"],
    },
    // ... is known to check, ...
    Case {
        nodes: "n1 n2 n3",
        service: "NodePort Local health-check-node-port=\"31999\" alb.ingress.kubernetes.io/healthcheck-port=\"31999\"",
        pods: "a@n1 b@n2",
        balancer: "guess",
        table: "n1 1 Ok(Some(1)) yes 1/1 50\nn2 1 Ok(Some(1)) yes 1/1 50\nn3 0 Unavailable no dropped 0\n  a 50\n  b 50",
        findings: &[],
    },
    // ... or is known not to check.
    Case {
        nodes: "n1 n2 n3",
        service: "NodePort Local health-check-node-port=\"31999\" alb.ingress.kubernetes.io/healthcheck-port=traffic-port",
        pods: "a@n1 b@n2",
        balancer: "aws-alb",
        table: "n1 1 Open yes 1/1 50\nn2 1 Open yes 1/1 50\nn3 0 Silence no dropped 0\n  a 50\n  b 50",
        findings: &["warning check-times-out"],
    },
    // Its own node port is not a health port.
    Case {
        nodes: "n1 n2 n3",
        service: "NodePort Local health-check-node-port=\"30080\"",
        pods: "a@n1 b@n2",
        balancer: "haproxy",
        table: "n1 1 Open yes 1/1 50\nn2 1 Open yes 1/1 50\nn3 0 Silence no dropped 0\n  a 50\n  b 50",
        findings: &["warning check-times-out", "warning object"],
    },
    Case {
        nodes: "n1 n2",
        service: "NodePort Cluster health-check-node-port=\"31999\"",
        pods: "a@n1 b@n2",
        balancer: "haproxy",
        table: "n1 1 Ok(None) yes 1/2 50\nn2 1 Ok(None) yes 1/2 50\n  a 50\n  b 50",
        findings: &["warning object"],
    },
    // With the fallback, nodes without a pod are unhealthy, and requests that arrive there
    // nevertheless are forwarded.
    Case {
        nodes: "n1 n2 n3",
        service: "LoadBalancer Local external-fallback=cluster",
        pods: "a@n1 b@n2",
        balancer: "gke",
        table: "n1 1 Ok(Some(1)) yes 1/1 50\nn2 1 Ok(Some(1)) yes 1/1 50\nn3 0 Unavailable no 0/2 0\n  a 50\n  b 50",
        findings: &[],
    },
    // A balancer that checks the traffic port sends there, too; so does one that fails open.
    Case {
        nodes: "n1 n2 n3",
        service: "NodePort Local external-fallback=cluster",
        pods: "a@n1 b@n2 c@n2",
        balancer: "aws-alb",
        table: "n1 1 Open yes 1/1 33\nn2 2 Open yes 2/2 33\nn3 0 Open yes 0/3 33\n  a 44\n  b 28\n  c 28",
        findings: &["warning healthy-without-pod", "note uneven"],
    },
    Case {
        nodes: "n1/excluded n2",
        service: "LoadBalancer Local external-fallback=cluster",
        pods: "a@n1",
        balancer: "aws-nlb",
        table: "n1 1 Ok(Some(1)) no 1/1 0\nn2 0 Unavailable yes 0/1 100\n  a 100",
        findings: &["error nobody-healthy", "note one-node"],
    },
    Case {
        nodes: "n1 n2",
        service: "LoadBalancer Cluster external-fallback=cluster drain=90s",
        pods: "a@n1 b@n2",
        balancer: "gke",
        table: "n1 1 Ok(None) yes 1/2 50\nn2 1 Ok(None) yes 1/2 50\n  a 50\n  b 50",
        findings: &["warning object"],
    },
    // An endpoint's node without a Node object (any more) gets no traffic from a balancer.
    Case {
        nodes: "n1/gce",
        service: "LoadBalancer Local",
        pods: "a@n1 b@gone",
        balancer: "guess",
        table: "gone 1 Ok(Some(1)) no 1/1 0\nn1 1 Ok(Some(1)) yes 1/1 100\n  a 100\n  b 0",
        findings: &["warning unhealthy-with-pod", "warning uneven"],
    },
];

#[test]
fn clusters() {
    let mut failures = Vec::new();
    for (at, case) in CASES.iter().enumerate() {
        let yaml = manifests(case.nodes, case.service, case.pods);
        let (found, codes) =
            judged(&yaml, case.balancer, |judge, judgement| (table(judge, judgement), codes(judgement)));
        let expected = case.table;
        if found != expected || codes != case.findings {
            failures.push(format!(
                "case {at} ({} | {} | {} | {}):\n{found}\n{codes:?}\nexpected\n{expected}\n{:?}",
                case.nodes, case.service, case.pods, case.balancer, case.findings
            ));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

#[test]
fn a_service_that_nobody_reaches_from_outside_is_not_judged() {
    let cluster = cluster(&manifests("n1", "ClusterIP", "a@n1"));
    assert_eq!(cluster.exposed().count(), 0);
    assert!(Judge::new(&cluster, None, Overrides::default()).service(&web()).is_none());
    assert_eq!(cluster.named("web").len(), 1);
}

/// The sum of no floats is -0.0, which is printed as such.
#[test]
fn nothing_lost_is_no_negative_number() {
    let yaml = manifests("n1 n2", "LoadBalancer Cluster", "a@n1");
    assert!(judged(&yaml, "gke", |_, judgement| judgement.ports[0].lost.is_sign_positive()));
}

#[test]
fn cures_are_to_be_pasted() {
    let yaml = manifests("n1 n2", "LoadBalancer Local", "a@n1 b@n1");
    let text = judged(&yaml, "gke", |_, judgement| judgement.findings[0].yaml.clone().unwrap());
    let value: serde_yaml_ng::Value = serde_yaml_ng::from_str(&text).unwrap();
    let spread = &value["topologySpreadConstraints"][0];
    assert_eq!(spread["topologyKey"], "kubernetes.io/hostname");
    assert_eq!(spread["labelSelector"]["matchLabels"]["app"], "web");
}

#[test]
fn a_health_port_is_to_be_pasted() {
    let fix = |service: &str, balancer: &str| -> serde_json::Value {
        let yaml = manifests("n1 n2 n3", service, "a@n1 b@n2");
        judged(&yaml, balancer, |_, judgement| {
            let finding = &judgement.findings[0];
            assert_eq!(finding.code, "check-times-out");
            let yaml: serde_yaml_ng::Value = serde_yaml_ng::from_str(finding.yaml.as_ref().unwrap()).unwrap();
            serde_json::to_value(&yaml["annotations"]).unwrap()
        })
    };
    let ours = "traffic-policy.io/health-check-node-port";
    let for_an_alb = fix("NodePort Local", "aws-alb");
    assert_eq!(for_an_alb[ours], "31999");
    assert_eq!(for_an_alb["alb.ingress.kubernetes.io/healthcheck-port"], "31999");
    // The suggested port is one that no Service has; here the annotation names the node port.
    let for_another = fix("NodePort Local health-check-node-port=\"30080\"", "custom");
    assert_eq!(for_another, serde_json::json!({ours: "31999"}));
}

#[test]
fn the_balancer_is_guessed_and_why_is_said() {
    let why = |nodes: &str, service: &str| {
        let yaml = manifests(nodes, service, "a@n1");
        judged(&yaml, "guess", |_, judgement| (judgement.balancer.name, judgement.why_balancer.clone()))
    };
    assert_eq!(why("n1", "LoadBalancer").0, "custom");
    let (name, because) = why("n1/gce", "LoadBalancer");
    assert_eq!(name, "gke");
    assert!(because.contains("gce://"), "{because}");
    // The cloud controller does not handle Services of type NodePort.
    assert_eq!(why("n1/gce", "NodePort").0, "custom");
    let (name, because) = why("n1", "LoadBalancer weighted");
    assert_eq!(name, "gke");
    assert!(because.contains("networking.gke.io/weighted-load-balancing"), "{because}");
}

#[test]
fn what_a_person_says_of_the_balancer_counts() {
    let file = "check-under-local: traffic-policy\n";
    assert!(serde_yaml_ng::from_str::<Overrides>(file).is_err());
    let file = "check-under-local: traffic-port\ncheck-interval: 1m\nfail-open: true\n";
    let mut overrides: Overrides = serde_yaml_ng::from_str(file).unwrap();
    overrides.prefer(&Overrides { check_interval: Some("4s".parse().unwrap()), ..Overrides::default() });
    let cluster = cluster(&manifests("n1 n2", "LoadBalancer Local", "a@n1"));
    let judge = Judge::new(&cluster, by_name("gke"), overrides);
    let judgement = judge.service(&web()).unwrap();
    assert!(table(&judge, &judgement).starts_with("n1 1 Open yes"), "{}", table(&judge, &judgement));
    assert_eq!(
        judgement.balancer.local.interval,
        super::super::balancer::sure(std::time::Duration::from_secs(4))
    );
    assert!(judgement.balancer.fail_open.sure);
}

/// MetalLB's speakers count endpoints that are ready or serving; a health port counts ready ones.
#[test]
fn metallb_announces_a_node_whose_last_pod_terminates() {
    let yaml = manifests("n1 n2 n3", "LoadBalancer Local", "a@n1 b@n2/terminating");
    for (balancer, wanted) in [("metallb-l2", "n2 0 Announced"), ("gke", "n2 0 Unavailable")] {
        let table = judged(&yaml, balancer, table);
        assert!(table.lines().any(|line| line.starts_with(wanted)), "{balancer}: {table}");
        assert!(!table.contains("n3 0 Announced"), "{balancer}: {table}");
    }
}

#[test]
fn ports_that_are_alike_show_each_address_of_a_pod() {
    let yaml = manifests("n1 n2", "NodePort Cluster", "a@n1 b@n2")
        .replace(
            "[{name: http, port: 80,",
            "[{name: admin, port: 81, nodePort: 30081}, {name: http, port: 80,",
        )
        .replace("[{name: http, port: 8080}]", "[{name: admin, port: 8081}, {name: http, port: 8080}]");
    let cluster = cluster(&yaml);
    let judge = Judge::new(&cluster, None, Overrides::default());
    let judgement = judge.service(&web()).unwrap();
    let [port] = &judgement.ports[..] else { panic!("{:?}", judgement.ports) };
    let addresses: Vec<_> = port.pods.iter().map(|pod| format!("{:?}", pod.addresses)).collect();
    assert_eq!(addresses, ["[10.244.0.1:8081, 10.244.0.1:8080]", "[10.244.0.2:8081, 10.244.0.2:8080]"]);
}
