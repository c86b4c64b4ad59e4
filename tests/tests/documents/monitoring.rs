//! deploy/monitoring: alert rules and the dashboard use only metrics, labels and outcomes that are
//! exported.

mod promql;

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
};

use serde_json::Value;
use traffic_policy_ebpf::outcome::Outcome;
use traffic_policy_testing::exposition::Kind;

use self::promql::{Sample, evaluate};
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
    let mut grouped = Vec::new();
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
        grouped.extend(labels.iter().map(String::as_str));
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
    for label in groups(query) {
        // A histogram's samples have a bound, too.
        if !grouped.contains(&label) && !TARGET.contains(&label) && label != "le" && faults.is_empty() {
            faults.push(format!("none of its metrics has the label {label}: {query}"));
        }
    }
    faults
}

/// The labels by which a query groups or matches series.
fn groups(query: &str) -> Vec<&str> {
    let lists = ["by (", "on (", "ignoring (", "without ("]
        .iter()
        .flat_map(|word| query.match_indices(word).map(|(at, word)| &query[at + word.len()..]));
    let lists = lists.filter_map(|list| list.split(')').next());
    lists.flat_map(|list| list.split(',')).map(str::trim).filter(|label| !label.is_empty()).collect()
}

/// The labels that the annotations of a rule take from a series of its query, and that it lacks.
fn lacking(rule: &Value, names: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let query = rule["expr"].as_str().unwrap();
    let has = |label: &&str| {
        let asked = names.iter().filter(|(name, _)| query.contains(name.as_str()));
        // What an aggregation leaves are the labels of its list.
        let left = query.starts_with("sum by").then(|| groups(query));
        let own = left.map_or_else(
            || asked.flat_map(|(_, labels)| labels).any(|own| own == label),
            |left| left.contains(label),
        );
        own || TARGET.contains(label) && (!query.starts_with("sum by") || groups(query).contains(label))
    };
    let texts = ["summary", "action"].map(|text| rule["annotations"][text].as_str().unwrap_or_default());
    let used = texts.iter().flat_map(|text| text.split("$labels.").skip(1));
    let used = used.filter_map(|text| text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next());
    used.filter(|label| !has(label)).map(|label| format!("{}: no label {label}", rule["alert"])).collect()
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
        assert_eq!(lacking(rule, &names), [""; 0]);
        assert!(["warning", "critical"].contains(&rule["labels"]["severity"].as_str().unwrap()), "{name}");
        for text in ["summary", "action"] {
            assert!(rule["annotations"][text].is_string(), "{name} has no {text}");
        }
    }
}

/// The instances for which an alert fires with these series, after what time.
fn firing(alert: &str, series: &[Sample]) -> (Vec<String>, String) {
    let rules: Value = serde_yaml_ng::from_str(&page::text(ALERTS)).unwrap();
    let rules = rules["groups"][0]["rules"].as_array().unwrap();
    let rule = rules.iter().find(|rule| rule["alert"] == alert).unwrap();
    let found = evaluate(rule["expr"].as_str().unwrap(), series).unwrap();
    let instances = found.iter().map(|sample| sample.labels["instance"].clone()).collect();
    (instances, rule["for"].as_str().unwrap_or_default().to_owned())
}

/// A rollout, and an endpoint that is newer than its own node knows, are no faults.
const LASTS: &str = "10m";

/// A node that is to open packets and does not, while others do.
#[test]
fn nodes_that_open_nothing_are_alerts() {
    let fires = |nodes: &[(&str, &str, f64, f64)]| {
        let series = nodes.iter().flat_map(|(instance, job, opens, leaving)| {
            let labels = [("instance", *instance), ("job", *job)];
            [("traffic_policy_direct_opens", *opens), ("traffic_policy_leaving", *leaving)]
                .map(|(metric, value)| Sample::new(metric, &labels, value))
        });
        let (instances, lasts) = firing("TrafficPolicyOpensNothing", &series.collect::<Vec<_>>());
        assert_eq!(lasts, LASTS);
        instances.join(" ")
    };
    assert_eq!(fires(&[("a", "x", 1.0, 0.0), ("b", "x", 0.0, 0.0), ("c", "x", 0.0, 0.0)]), "b c");
    assert_eq!(fires(&[("a", "x", 1.0, 0.0), ("b", "x", 1.0, 0.0)]), "");
    assert_eq!(fires(&[("a", "x", 0.0, 0.0), ("b", "x", 0.0, 0.0)]), "", "nobody is to open any");
    assert_eq!(fires(&[("a", "x", 1.0, 0.0), ("b", "y", 0.0, 0.0)]), "", "those of another cluster do");
    assert_eq!(fires(&[("a", "x", 1.0, 0.0), ("b", "x", 0.0, 1.0)]), "", "it is about to go");
}

/// Packets that other nodes forward directly to no endpoint.
#[test]
fn packets_for_no_endpoint_are_alerts() {
    let fires = |rates: &[(&str, &str, &str, f64)]| {
        let series = rates.iter().map(|(instance, hook, outcome, rate)| {
            let labels = [("instance", *instance), ("job", "x"), ("hook", *hook), ("outcome", *outcome)];
            Sample::new("traffic_policy_packets_total", &labels, *rate)
        });
        let (instances, lasts) = firing("TrafficPolicyUnknownEndpoint", &series.collect::<Vec<_>>());
        assert_eq!(lasts, LASTS);
        instances.join(" ")
    };
    let unknown = "dropped-unknown-endpoint";
    assert_eq!(fires(&[("a", "xdp", unknown, 0.6), ("a", "tc-ingress", unknown, 0.6)]), "a");
    assert_eq!(fires(&[("a", "xdp", unknown, 0.6), ("b", "xdp", unknown, 0.6)]), "", "one now and then");
    assert_eq!(fires(&[("a", "xdp", "forwarded", 900.0), ("b", "xdp", unknown, 2.0)]), "b");
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
        ("sum by (instance, device) (traffic_policy_packets_total)", "has the label device"),
        ("traffic_policy_healthy == 0 and on (node) traffic_policy_leaving == 1", "has the label node"),
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
