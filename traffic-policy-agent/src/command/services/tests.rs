use std::{sync::LazyLock, time::Duration};

use traffic_policy_cluster::model::{Forwarding, FrontendKind, Policy};
use traffic_policy_ebpf::abi::IndexRange;

use super::*;
use crate::command::view;

fn port() -> ServicePort {
    let endpoint = |text: &str, node| Endpoint {
        address: text.parse().unwrap(),
        local: node == 0,
        remote: node != 0,
        opens: (node == 2).then_some(Dispatch::Ipip),
        held: None,
        node,
        weight: 1,
    };
    ServicePort {
        frontends: vec![FrontendView {
            address: "172.18.0.11:30080".parse().unwrap(),
            kind: FrontendKind::NodePort,
            policy: Policy::Local,
            phase: Phase::Draining(Duration::from_secs(28)),
        }],
        cluster: vec![endpoint("10.244.1.2:8080", 0), endpoint("10.244.2.2:8080", 2)],
        affinity: Some(Duration::from_secs(10_800)),
        source_ranges: vec!["192.0.2.0/24".parse().unwrap()],
        choice: Choice::Maglev(IndexRange { base: 0, len: 16_381 }),
        forwarding: Forwarding::Direct,
        ..view::tests::port()
    }
}

fn nodes(dead: bool) -> Nodes {
    Nodes::of(&[(2, "node-2", dead), (3, "node-3", false)])
}

fn shown<'a>(port: &'a ServicePort, nodes: &'a Nodes, left_out: Option<&'a [EndpointLeftOut]>) -> Shown<'a> {
    static COUNTS: LazyLock<Counts> = LazyLock::new(counts);
    Shown { port, counts: &COUNTS, nodes, left_out, slots: None, former: None }
}

fn counts() -> Counts {
    let count = |packets, bytes| Count { packets, bytes };
    Counts {
        packets: [
            ((2, Outcome::Connected), count(9, 9)),
            ((3, Outcome::Forwarded), count(5, 300)),
            ((3, Outcome::ForwardedIcmpError), count(4, 224)),
            ((3, Outcome::DroppedNoLocalEndpoint), count(2, 120)),
            ((4, Outcome::Forwarded), count(9, 9)),
        ]
        .into(),
        flows: [(3, 1)].into(),
    }
}

#[test]
fn one_line_for_each_frontend() {
    let mut out = Vec::new();
    overview(&mut out, &[port()], &counts()).unwrap();
    let text = String::from_utf8(out).unwrap();
    let line: Vec<_> = text.lines().nth(1).unwrap().split("  ").filter(|cell| !cell.is_empty()).collect();
    assert_eq!(
        line.iter().map(|cell| cell.trim()).collect::<Vec<_>>(),
        [
            "shop/web:http",
            "NodePort",
            "172.18.0.11:30080/tcp",
            "Local",
            "draining, 28s left",
            "2 (1 here)",
            "1",
            "11",
            "2"
        ]
    );
}

#[test]
fn all_that_is_known() {
    let mut out = Vec::new();
    details(&mut out, &Shown { slots: Some(&[5460, 10_921]), ..shown(&port(), &nodes(false), Some(&[])) })
        .unwrap();
    let text = String::from_utf8(out).unwrap();
    for line in [
        "policy      external Local, internal Cluster",
        "affinity    a client keeps its endpoint for 3h00m",
        "sources     192.0.2.0/24",
        "algorithm   maglev, 16381 slots",
        "forwarding  direct, to 1 of 1 endpoints of other nodes",
        "10.244.1.2:8080  (here), 33.33 % of new connections",
        "10.244.2.2:8080  on node-2, ipip, 66.67 % of new connections\n",
        "local list  none",
        "dropped-no-local-endpoint               2  120 bytes",
        "flows       1",
    ] {
        assert!(text.contains(line), "no {line:?} in\n{text}");
    }
    assert!(!text.contains("connected"), "of another Service\n{text}");
    assert!(!text.contains("left out"), "nobody is dead\n{text}");
    let mut out = Vec::new();
    details(&mut out, &shown(&port(), &nodes(true), None)).unwrap();
    let text = String::from_utf8(out).unwrap();
    for line in
        ["10.244.2.2:8080  on node-2, left out, ipip\n", "  left out    any endpoint on node-2, dead\n"]
    {
        assert!(text.contains(line), "no {line:?} in\n{text}");
    }
}

#[test]
fn fields_for_programs() {
    let (port, nodes) = (port(), nodes(true));
    let slots = Shown { slots: Some(&[5460, 10_921]), ..shown(&port, &nodes, None) };
    let document = serde_json::to_value(Document::new(&slots)).unwrap();
    assert_eq!([0, 1].map(|at| document["endpoints"][at]["slots"].as_u64()), [5460, 10_921].map(Some));
    let document = serde_json::to_value(Document::new(&shown(&port, &nodes, None))).unwrap();
    assert_eq!(document["endpoints"][0]["slots"], serde_json::Value::Null, "not asked for");
    assert_eq!(document["frontends"][0]["phase"], "draining");
    assert_eq!((&document["algorithm"], &document["maglev_slots"]), (&"maglev".into(), &16_381.into()));
    assert_eq!(document["frontends"][0]["drain_seconds"], 28.0);
    assert_eq!(document["endpoints"][0]["local"], true);
    assert_eq!(document["endpoints"][0]["node"], serde_json::Value::Null, "this node");
    assert_eq!(document["endpoints"][1]["node"], "node-2");
    assert_eq!([0, 1].map(|at| document["endpoints"][at]["left_out"] == true), [false, true]);
    assert_eq!(document["left_out"], serde_json::json!(["node-2"]));
    assert_eq!(document["endpoints_left_out"], serde_json::Value::Null, "nobody tells");
    assert_eq!(document["counts"]["forwarded"]["bytes"], 300);
    assert_eq!(document["affinity_seconds"], 10_800);
    assert_eq!(document["flows"], 1);
}

/// Those of another Service port are not named.
#[test]
fn endpoints_that_are_left_out() {
    let key = port().key;
    let endpoint = |port: &str, address: &str, node: Option<&str>| EndpointLeftOut {
        namespace: key.service.namespace.clone(),
        name: key.service.name.clone(),
        port: port.to_owned(),
        protocol: "TCP".to_owned(),
        address: address.parse().unwrap(),
        node: node.map(str::to_owned),
    };
    let all = [
        endpoint(&key.port, "10.244.2.3:8080", Some("node-2")),
        endpoint(&key.port, "10.244.7.3:8080", None),
        endpoint("other", "10.244.2.3:9090", Some("node-2")),
        endpoint(&key.port, "[fd00::3]:8080", Some("node-2")),
    ];
    let mut out = Vec::new();
    details(&mut out, &shown(&port(), &nodes(true), Some(&all))).unwrap();
    let text = String::from_utf8(out).unwrap();
    let lines: Vec<_> = text.lines().skip_while(|line| !line.starts_with("  left out")).take(3).collect();
    assert_eq!(lines[0], "  left out    10.244.2.3:8080 on node-2, dead", "{text}");
    assert_eq!(lines[1].trim(), "10.244.7.3:8080, its next hop is dead", "{text}");
    assert!(lines[2].starts_with("  packets"), "{text}");
    let document = serde_json::to_value(Document::new(&shown(&port(), &nodes(true), Some(&all)))).unwrap();
    let expected = serde_json::json!([
        {"address": "10.244.2.3:8080", "node": "node-2"}, {"address": "10.244.7.3:8080", "node": null}
    ]);
    assert_eq!(document["endpoints_left_out"], expected);
}
