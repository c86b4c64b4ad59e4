//! Settings of agents: `--forwarding` and `--algorithm` for all Services, nodes that open packets
//! by their Leases, and weights of endpoints.

use traffic_policy_cluster::model::{Algorithm, Forwarding};

use super::{
    scene::{SECOND, Scene},
    *,
};
use crate::{Agents, Change, Proxy, Simulated, WhatIf, Why};

const NODES: &str = "n1 n2 n3";
const PODS: &str = "a@n1 b@n2";

/// A Lease of a node: what it opens, and what its agent runs with.
fn lease(node: &str, opens: &str, settings: &str) -> String {
    format!(
        "---\napiVersion: coordination.k8s.io/v1\nkind: Lease\n\
         metadata:\n  name: traffic-policy-opens-{node}\n  namespace: opening\n\
         \x20 labels: {{traffic-policy.io/opens: {opens}}}\n  annotations: {{traffic-policy.io/opens-from: 192.0.2.1, \
         traffic-policy.io/opens-l2-by: \"{settings} 16381 1\"}}\n\
         spec: {{holderIdentity: {node}}}\n"
    )
}

fn found(cluster: &Cluster, name: &str) -> Vec<String> {
    let judge = Judge::new(cluster, balancer(name), Overrides::default());
    codes(&judge.service(&web()).unwrap())
}

fn has(codes: &[String], code: &str) -> bool {
    codes.iter().any(|found| found == code)
}

/// Source ranges, and a node without a pod, behind a balancer whose address moves.
fn of(
    forwarding: Option<Forwarding>,
    algorithm: Option<Algorithm>,
    annotations: &str,
    leases: &str,
) -> Cluster {
    let service = format!("LoadBalancer Cluster ranges {annotations}");
    let mut cluster = cluster(&(manifests(NODES, &service, PODS) + leases));
    cluster.set_agents(forwarding, algorithm);
    cluster
}

#[test]
fn services_without_annotations_follow_the_agents() {
    let (direct, maglev) = (Some(Forwarding::Direct), Some(Algorithm::Maglev));
    let codes = |cluster: &Cluster| found(cluster, "metallb-bgp");
    let by_snat = codes(&of(None, None, "", ""));
    assert!(
        has(&by_snat, "note client-address") && has(&by_snat, "warning healthy-without-pod"),
        "{by_snat:?}"
    );
    let alone = codes(&of(direct, None, "", ""));
    assert!(!has(&alone, "note client-address") && has(&alone, "warning healthy-without-pod"), "{alone:?}");
    let both = codes(&of(direct, maglev, "", ""));
    assert!(!has(&both, "note client-address") && has(&both, "note healthy-without-pod"), "{both:?}");
    let tunnel = codes(&of(Some(Forwarding::Tunnel), maglev, "", ""));
    assert!(has(&tunnel, "note healthy-without-pod"), "{tunnel:?}");
    // The annotations come first.
    assert_eq!(codes(&of(direct, maglev, "forwarding=snat", "")), by_snat);
    let random = codes(&of(direct, maglev, "algorithm=random", ""));
    assert!(has(&random, "warning healthy-without-pod"), "{random:?}");
}

#[test]
fn leases_say_what_agents_run_with_and_who_opens() {
    let all = |settings: &str| NODES.split(' ').map(|node| lease(node, "ipip", settings)).collect::<String>();
    let agents = |leases: &str, forwarding| {
        let cluster = of(forwarding, None, "", leases);
        cluster.treatment(cluster.index().services().next().unwrap())
    };
    let both = Agents { forwarding: Forwarding::Direct, algorithm: Algorithm::Maglev };
    assert_eq!(agents(&all("direct maglev"), None), both);
    assert_eq!(agents(&all("direct maglev"), Some(Forwarding::Snat)).forwarding, Forwarding::Snat);
    let one_differs = all("direct maglev") + &lease("n4", "ipip", "snat random");
    assert_eq!(agents(&one_differs, None), Agents::default(), "a rollout");
    assert_eq!(agents("", None), Agents::default());

    let codes = |leases: &str| found(&of(None, None, "", leases), "metallb-bgp");
    let opened = codes(&all("direct maglev"));
    assert!(!has(&opened, "note client-address") && has(&opened, "note healthy-without-pod"), "{opened:?}");
    assert!(!has(&opened, "warning opens-nothing"), "{opened:?}");
    // A node with a pod that opens nothing, and one without a Lease.
    let of_others = lease("n1", "ipip", "direct maglev") + &lease("n3", "ipip", "direct maglev");
    for leases in [of_others.clone() + &lease("n2", "none", "direct maglev"), of_others] {
        let closed = codes(&leases);
        for code in ["note client-address", "warning healthy-without-pod", "warning opens-nothing"] {
            assert!(has(&closed, code), "{code}: {closed:?}");
        }
    }
    // The node without a pod has nothing to open.
    let without = lease("n1", "ipip", "direct maglev") + &lease("n2", "ipip", "direct maglev");
    assert!(!has(&codes(&without), "warning opens-nothing"));
    // Nobody has one, as the API says; a folder may just have none.
    let mut none = of(None, None, "forwarding=direct algorithm=maglev", "");
    assert!(!has(&found(&none, "metallb-bgp"), "warning opens-nothing"));
    none.leases_are_listed();
    assert!(has(&found(&none, "metallb-bgp"), "warning opens-nothing"));
}

/// A cluster that changes follows its Leases, as `lb watch` does.
#[test]
fn leases_are_heeded_after_each_change() {
    let objects = |leases: &str| {
        let folder = tempfile::tempdir().unwrap();
        let yaml = manifests(NODES, "LoadBalancer Cluster", PODS) + leases;
        std::fs::write(folder.path().join("a.yaml"), yaml).unwrap();
        source::read_cluster(folder.path()).unwrap()
    };
    let all = |of_n1: &str| lease("n1", of_n1, "direct maglev") + &lease("n2", "ipip", "direct maglev");
    let mut cluster = Cluster::new(Index::default());
    // Leases, whether a node opens nothing, and whether agents are known to use direct forwarding.
    for (leases, closed, direct) in [
        (String::new(), false, false),
        (all("ipip"), false, true),
        (all("none"), true, true),
        (all("ipip"), false, true),
        (lease("n2", "ipip", "direct maglev"), true, true),
        (String::new(), false, false),
    ] {
        cluster.change(|index| _ = objects(&leases).apply(index));
        let treatment = cluster.treatment(cluster.index().services().next().unwrap());
        assert_eq!(treatment.forwarding.is_direct(), direct, "{leases}");
        assert_eq!(has(&found(&cluster, "metallb-bgp"), "warning opens-nothing"), closed, "{leases}");
    }
    // What the user says of agents stays.
    cluster.set_agents(Some(Forwarding::Snat), None);
    cluster.change(|index| _ = objects(&all("none")).apply(index));
    assert!(!has(&found(&cluster, "metallb-bgp"), "warning opens-nothing"));
}

#[test]
fn changes_and_simulations_begin_with_the_agents() {
    let cut = |cluster: &Cluster, proxy| {
        let gone = [Change::Node("n3".to_owned(), crate::NodeChange::Gone)];
        let what_if = WhatIf::new(cluster, &web(), &gone, proxy).unwrap().unwrap();
        let judges = what_if.judges(balancer("metallb-bgp"), &Overrides::default());
        let [before, after] = judges.each_ref().map(|judge| judge.service(&web()).unwrap());
        what_if.cost(&(&judges[0], &before), &(&judges[1], &after)).cut.len()
    };
    let agents = of(Some(Forwarding::Direct), Some(Algorithm::Maglev), "", "");
    assert_eq!(cut(&agents, Proxy::default()), 0);
    assert_eq!(cut(&agents, Proxy::KubeProxy), 1, "it has no such setting");
    assert_eq!(cut(&of(None, None, "", ""), Proxy::default()), 1);
}

fn play(cluster: &Cluster) -> Simulated {
    let mut scene = Scene::new("metallb-bgp", &[]);
    scene.load.request = SECOND * 2;
    // The hold time of BGP sessions is longer than the run.
    scene.balancer.vanished.value = SECOND * 10;
    scene.with(cluster, vec!["5s node=n3=gone".parse().unwrap()]).unwrap()
}

/// No packet of UDP is needed to find its endpoint but the table; an association of SCTP is found
/// by nobody else.
#[test]
fn flows_of_udp_outlive_the_node_in_front() {
    let outlived = |protocol: &str, forwarding| {
        let yaml = manifests(NODES, "LoadBalancer Cluster", PODS);
        let mut cluster =
            cluster(&yaml.replace("{name: http, ", &format!("{{name: http, protocol: {protocol}, ")));
        cluster.set_agents(Some(forwarding), Some(Algorithm::Maglev));
        let run = play(&cluster);
        (run.outlived > 60, run.why.get(&Why::NodeGone).copied().unwrap_or(0) > run.by_node()["n3"].lost)
    };
    for protocol in ["TCP", "UDP"] {
        assert_eq!(outlived(protocol, Forwarding::Direct), (true, false), "{protocol}");
        assert_eq!(outlived(protocol, Forwarding::Snat), (false, true), "{protocol}");
    }
    assert_eq!(outlived("SCTP", Forwarding::Direct), (false, true));
}

/// Shares of pods: two on one node, one on another.
#[test]
fn weights_count_where_agents_have_tables() {
    let shares = |annotations: &str, algorithm| {
        let yaml = manifests("n1 n2", &format!("LoadBalancer Cluster {annotations}"), "a@n1 b@n1 c@n2");
        let mut cluster = cluster(&yaml);
        cluster.set_agents(None, Some(algorithm));
        let judge = Judge::new(&cluster, balancer("gke"), Overrides::default());
        let judgement = judge.service(&web()).unwrap();
        assert!(!has(&codes(&judgement), "warning uneven"), "the annotation wants it so");
        let judged = judgement.ports[0].pods.iter().map(|pod| (pod.share * 100.0).round() as u64);
        let judged: Vec<_> = judged.collect();
        let played = Scene::new("gke", &[]).with(&cluster, Vec::new()).unwrap();
        let pods = played.by_pod();
        for (pod, share) in ["a", "b", "c"].into_iter().zip(&judged) {
            let of_pod = pods.get(pod).map_or(0, |counts| counts.ok);
            assert!(
                (of_pod / 60).abs_diff(*share) <= 2,
                "{annotations}: {of_pod} of 6000 to {pod}, not {share} %"
            );
        }
        judged
    };
    let (random, maglev) = (Algorithm::Random, Algorithm::Maglev);
    assert_eq!(shares("", maglev), [33, 33, 33]);
    assert_eq!(shares("weight=nodes", random), [33, 33, 33], "no table");
    assert_eq!(shares("weight=nodes", maglev), [25, 25, 50]);
    assert_eq!(shares("weight=nodes algorithm=maglev", random), [25, 25, 50]);
    assert_eq!(shares("weight=\"n1=0\"", maglev), [0, 0, 100]);
    assert_eq!(shares("weight=\"n1=3\"", maglev), [43, 43, 14]);
}
