//! deploy/monitoring: alert rules and the dashboard use only metrics, labels and outcomes that are
//! exported.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
};

use serde_json::Value;
use traffic_policy_ebpf::outcome::Outcome;
use traffic_policy_testing::exposition::Kind;

use crate::{metrics, page};

const ALERTS: &str = "deploy/monitoring/alerts.yaml";
const DASHBOARD: &str = "deploy/monitoring/grafana-dashboard.json";
/// The page that lists the values of the label `map`.
const METRICS: &str = "docs/metrics.md";
/// Labels that Prometheus itself adds to each series.
const TARGET: [&str; 2] = ["instance", "job"];

/// The names that queries may use, with their labels.
fn exported() -> BTreeMap<String, BTreeSet<String>> {
    let mut names = BTreeMap::new();
    for family in metrics::exported() {
        let labels: BTreeSet<String> =
            family.samples.iter().flat_map(|sample| sample.labels.keys().cloned()).collect();
        match family.kind {
            Some(Kind::Histogram) => {
                for part in ["_bucket", "_sum", "_count"] {
                    names.insert(format!("{}{part}", family.name), labels.clone());
                }
            }
            _ => drop(names.insert(family.name.clone(), labels)),
        }
    }
    names
}

/// The faults of a query.
fn faults(query: &str, names: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let mut faults = Vec::new();
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let mut found = 0;
    for (at, _) in query.match_indices(['t', 'k', 'p']) {
        let rest = &query[at..];
        let begins = !query[..at].ends_with(is_name);
        let prefixed =
            ["traffic_policy_", "kubeproxy_", "process_"].iter().any(|prefix| rest.starts_with(prefix));
        if !begins || !prefixed {
            continue;
        }
        found += 1;
        let end = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
        let (name, behind) = rest.split_at(end);
        let Some(labels) = names.get(name) else {
            faults.push(format!("{name} is not exported: {query}"));
            continue;
        };
        let Some(selector) = behind.strip_prefix('{').and_then(|behind| behind.split('}').next()) else {
            continue;
        };
        for matcher in selector.split(',') {
            let label = matcher.split(['=', '!']).next().unwrap().trim();
            if !labels.contains(label) && !TARGET.contains(&label) {
                faults.push(format!("{name} has no label {label}: {query}"));
            }
            let value = matcher.split('"').nth(1).filter(|value| !value.contains(['(', '.', '*', '$']));
            for value in value.iter().flat_map(|value| value.split('|')) {
                let known = match label {
                    "outcome" => Outcome::ALL.iter().any(|own| own.name() == value),
                    // Its names are those of a running agent, which the suite `metrics` compares.
                    "map" => page::text(METRICS).contains(&format!("`{value}`")),
                    _ => true,
                };
                if !known {
                    faults.push(format!("there is no {label} {value}: {query}"));
                }
            }
        }
    }
    if found == 0 {
        faults.push(format!("no metric is asked for: {query}"));
    }
    faults
}

#[test]
fn alerts_ask_for_what_is_exported() {
    let rules: Value = serde_yaml_ng::from_str(&page::text(ALERTS)).unwrap();
    let rules: Vec<_> = rules["groups"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|group| group["rules"].as_array().unwrap())
        .collect();
    assert!(rules.len() > 5);
    let names = exported();
    let faults: Vec<_> =
        rules.iter().flat_map(|rule| faults(rule["expr"].as_str().unwrap(), &names)).collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    for rule in rules {
        let name = &rule["alert"];
        assert!(["warning", "critical"].contains(&rule["labels"]["severity"].as_str().unwrap()), "{name}");
        for text in ["summary", "action"] {
            assert!(rule["annotations"][text].is_string(), "{name} has no {text}");
        }
    }
}

/// Nodes that are to open packets and do not, and packets that are opened for nobody.
#[test]
fn faults_of_direct_forwarding_are_alerts() {
    let rules: Value = serde_yaml_ng::from_str(&page::text(ALERTS)).unwrap();
    let rules = rules["groups"][0]["rules"].as_array().unwrap();
    for text in ["traffic_policy_direct_opens == 0", "outcome=\"dropped-unknown-endpoint\""] {
        let about = rules.iter().filter(|rule| rule["expr"].as_str().unwrap().contains(text));
        let times: Vec<_> = about.map(|rule| rule["for"].as_str()).collect();
        // A rollout, and an endpoint that is newer than its own node knows, are no faults.
        assert_eq!(times, [Some("10m")], "{text}");
    }
}

#[test]
fn the_dashboard_asks_for_what_is_exported() {
    let dashboard: Value = serde_json::from_str(&page::text(DASHBOARD)).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    assert!(panels.len() > 10);
    let names = exported();
    let mut wrong = Vec::new();
    let mut ids = BTreeSet::new();
    for panel in panels {
        assert!(
            ids.insert(panel["id"].as_u64().unwrap()),
            "{} has the number of another panel",
            panel["title"]
        );
        for target in panel["targets"].as_array().unwrap() {
            wrong.extend(faults(target["expr"].as_str().unwrap(), &names));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn wrong_queries_are_found() {
    let names = exported();
    for (query, fault) in [
        ("rate(traffic_policy_packets_totals[5m])", "is not exported"),
        ("traffic_policy_healthy{device=\"eth0\"}", "no label device"),
        (
            "traffic_policy_packets_total{outcome=~\"dropped-table-full|dropped-nothing\"}",
            "no outcome dropped-nothing",
        ),
        ("traffic_policy_map_entries{map!~\"flows|pending\"}", "no map pending"),
        ("up == 0", "no metric is asked for"),
    ] {
        let found = faults(query, &names);
        assert!(found.len() == 1 && found[0].contains(fault), "{query}: {found:?}");
    }
    assert_eq!(
        faults("kubeproxy_network_programming_duration_seconds_bucket{instance=\"a\"}", &names),
        [""; 0]
    );
}

#[test]
fn prometheus_takes_the_rules() {
    match Command::new("promtool").args(["check", "rules"]).arg(page::root().join(ALERTS)).output() {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => traffic_policy_testing::skipped(
            "prometheus_takes_the_rules",
            format!("no promtool here: {error}"),
        ),
    }
}
