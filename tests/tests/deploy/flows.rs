//! `explain --flows`: many flows at once, evaluated with objects from the API and with the same
//! objects in a folder.

use std::fs;
use std::net::SocketAddr;

use serde_json::{Value, json};
use traffic_policy_testing::api_server::ApiServer;

use crate::kubectl::{Installed, out};

const OBJECTS: &str = include_str!("flows.yaml");

/// A flow on node-1: name, source, destination, protocol; then verdict, outcome, and the possible
/// endpoints.
type Row = (&'static str, &'static str, (&'static str, u16), &'static str, [&'static str; 3]);

const CLIENT: &str = "198.51.100.9";
const CLIENT_6: &str = "2001:db8:9::9";

const ROWS: &[Row] = &[
    ("Cluster", CLIENT, ("192.0.2.1", 30010), "TCP", ["endpoints", "", "10.244.1.2:8080 10.244.2.2:8080"]),
    (
        "Cluster, UDP",
        CLIENT,
        ("192.0.2.1", 30011),
        "UDP",
        ["endpoints", "", "10.244.1.2:5353 10.244.2.2:5353"],
    ),
    (
        "Cluster, VIP",
        CLIENT,
        ("203.0.113.10", 80),
        "TCP",
        ["endpoints", "", "10.244.1.2:8080 10.244.2.2:8080"],
    ),
    (
        "Local, with endpoint",
        CLIENT,
        ("192.0.2.1", 30020),
        "TCP",
        ["endpoints", "delivered", "10.244.1.3:8080"],
    ),
    ("Local, VIP", CLIENT, ("203.0.113.20", 80), "TCP", ["endpoints", "delivered", "10.244.1.3:8080"]),
    ("Local, without", CLIENT, ("192.0.2.1", 30030), "TCP", ["drop", "dropped-no-local-endpoint", ""]),
    ("Local, VIP, without", CLIENT, ("203.0.113.30", 80), "TCP", ["drop", "dropped-no-local-endpoint", ""]),
    ("no endpoint", CLIENT, ("192.0.2.1", 30040), "TCP", ["reject", "rejected-no-endpoint", ""]),
    (
        "IPv6, Cluster",
        CLIENT_6,
        ("2001:db8::1", 30010),
        "TCP",
        ["endpoints", "", "[fd00:10:244:1::2]:8080 [fd00:10:244:2::2]:8080"],
    ),
    (
        "IPv6, VIP",
        CLIENT_6,
        ("2001:db8:113::10", 80),
        "TCP",
        ["endpoints", "", "[fd00:10:244:1::2]:8080 [fd00:10:244:2::2]:8080"],
    ),
    (
        "IPv6, Local, without",
        CLIENT_6,
        ("2001:db8::1", 30020),
        "TCP",
        ["drop", "dropped-no-local-endpoint", ""],
    ),
    ("a pod, ClusterIP", "10.244.1.9", ("10.96.0.30", 80), "TCP", ["endpoints", "", "10.244.2.4:8080"]),
    ("the node, node port", "192.0.2.1", ("192.0.2.1", 30030), "TCP", ["endpoints", "", "10.244.2.4:8080"]),
    ("another node's", CLIENT, ("192.0.2.2", 30010), "TCP", ["unhandled", "", ""]),
    ("not ours", CLIENT, ("192.0.2.1", 22), "TCP", ["unhandled", "", ""]),
    ("not ours, UDP", CLIENT, ("192.0.2.1", 30010), "UDP", ["unhandled", "", ""]),
];

fn flows() -> String {
    let flow = |(number, (name, source, (destination, port), protocol, _)): (usize, &Row)| json!({"name": name, "src": source, "sport": 40_000 + number, "dst": destination, "dport": port, "proto": protocol});
    Value::Array(ROWS.iter().enumerate().map(flow).collect()).to_string()
}

/// An answer without the SNAT port, which is drawn each time.
fn judged(answer: &Value) -> Value {
    let mut answer = answer.clone();
    if let Some(source) = answer["source"].as_str() {
        let address: SocketAddr = source.parse().unwrap();
        answer["source"] = address.ip().to_string().into();
    }
    answer["steps"].as_array_mut().unwrap().retain(|step| !step.as_str().unwrap().starts_with("port: "));
    answer
}

/// Parses one answer from each line.
fn answers(text: &str) -> Vec<Value> {
    let answers: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(answers.len(), ROWS.len(), "{text}");
    answers
}

#[tokio::test(flavor = "multi_thread")]
async fn flows_of_the_api_are_judged_as_those_of_a_folder() {
    let installed = Installed::new();
    let file = |name: &str, text: &str| {
        fs::write(installed.folder.path().join(name), text).unwrap();
        installed.path(name)
    };
    fs::write(installed.folder.path().join("manifests/a.yaml"), OBJECTS).unwrap();
    let (flows, manifests) = (file("flows.json", &flows()), installed.path("manifests"));
    let explain = ["explain", "--flows", &flows, "--node-name", "node-1"];
    let of_the_folder =
        answers(&out(&installed.agent(&[&explain[..], &["--manifests", &manifests]].concat())));

    let server = ApiServer::start().unwrap();
    server.apply(OBJECTS).unwrap();
    server.write_kubeconfig(&installed.folder.path().join("kubeconfig")).unwrap();
    let kubeconfig = installed.path("kubeconfig");
    let ask =
        || answers(&out(&installed.agent(&[&explain[..], &["--api", "--kubeconfig", &kubeconfig]].concat())));
    let of_the_api = ask();

    for ((name, .., [verdict, outcome, candidates]), (answer, other)) in
        ROWS.iter().zip(of_the_api.iter().zip(&of_the_folder))
    {
        assert_eq!(answer["name"], *name);
        assert_eq!(answer["verdict"], *verdict, "{answer}");
        assert!(outcome.is_empty() || answer["outcome"] == *outcome, "{answer}");
        let found: Vec<_> =
            answer["candidates"].as_array().unwrap().iter().map(|one| one.as_str().unwrap()).collect();
        assert_eq!(found.join(" "), *candidates, "{answer}");
        // The chosen endpoint agrees, too, and each step in its wording.
        assert_eq!(judged(answer), judged(other), "{name}");
    }

    // The objects of the API are evaluated: another policy there gives another verdict.
    server.apply(&OBJECTS.replace("externalTrafficPolicy: Local", "externalTrafficPolicy: Cluster")).unwrap();
    for (before, answer) in of_the_api.iter().zip(ask()) {
        let differs = answer["name"].as_str().unwrap().contains("Local");
        let of = |answer: &Value| (answer["verdict"].clone(), answer["candidates"].clone());
        assert_eq!(of(before) != of(&answer), differs, "{before} {answer}");
        assert!(!differs || answer["verdict"] == "endpoints", "{answer}");
    }
}
