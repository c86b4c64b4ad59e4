//! docs/metrics.md: every exported metric, with type, labels and help text.

use std::{
    collections::BTreeSet,
    time::{Duration, SystemTime},
};

use traffic_policy_agent::{
    health::ProxyHealth,
    metrics::{Metrics, Observed},
};
use traffic_policy_cluster::{
    model::{Protocol, ServiceName, ServicePortKey},
    source::Manifests,
};
use traffic_policy_dataplane::{Attached, DataplaneUsage, MapUsage, inspect::ServiceCount};
use traffic_policy_ebpf::outcome::Outcome;
use traffic_policy_testing::exposition::{Exposition, Family, Kind};

use crate::page;

const PAGE: &str = "docs/metrics.md";

/// The parts of the page, by the prefix of the names in them.
const PREFIXES: [&str; 3] = ["traffic_policy_", "kubeproxy_", "process_"];

#[test]
fn the_page_lists_every_metric() {
    let families = exported();
    for prefix in PREFIXES {
        let of: Vec<_> = families.iter().filter(|family| family.name.starts_with(prefix)).collect();
        page::compare(PAGE, prefix, &table(&of));
    }
    let others: Vec<_> = families
        .iter()
        .map(|family| &family.name)
        .filter(|name| !PREFIXES.iter().any(|prefix| name.starts_with(prefix)))
        .collect();
    assert!(others.is_empty(), "{PAGE} has no part for {others:?}");
}

/// Every family that can be exported; the sources of their samples are made up.
pub fn exported() -> Vec<Family> {
    let metrics = Metrics::new("node-1".to_owned(), ProxyHealth::new(true, true));
    metrics.count_packets(|| Ok(vec![("xdp", Outcome::Forwarded, 1)]));
    metrics.count_services(|| {
        Ok(vec![ServiceCount { key: port(), outcome: Outcome::Forwarded, packets: 1, bytes: 60 }])
    });
    metrics.observed(Observed {
        attached: vec![("eth0".to_owned(), Attached::Tc)],
        usage: DataplaneUsage {
            maps: vec![MapUsage { map: "slots", ipv6: Some(false), used: 1, size: 2 }],
            draining: vec![(port(), SystemTime::now())],
            ..DataplaneUsage::default()
        },
        warnings: vec![(port().service, 1)],
        ..Observed::default()
    });
    let folder = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // The metrics of the source exist once it has started.
    runtime.block_on(async {
        let source = Manifests { folder: folder.path().to_owned(), node_name: "node-1".to_owned() }.start();
        let mut status = source.status();
        let looked = status.wait_for(|status| status.last_contact.is_some());
        tokio::time::timeout(Duration::from_secs(60), looked).await.unwrap().unwrap();
        metrics.follow(source.status());
    });
    Exposition::parse(&metrics.render()).unwrap().families
}

fn port() -> ServicePortKey {
    let service = ServiceName { namespace: "default".to_owned(), name: "web".to_owned() };
    ServicePortKey { service, port: "http".to_owned(), protocol: Protocol::Tcp, ipv6: false }
}

fn table(families: &[&Family]) -> String {
    let mut rows: Vec<_> = families.iter().map(|family| row(family)).collect();
    rows.sort();
    page::table(&["Metric", "Type", "Labels", "Meaning"], &rows)
}

fn row(family: &Family) -> Vec<String> {
    let labels: BTreeSet<_> = family
        .samples
        .iter()
        .flat_map(|sample| sample.labels.keys())
        // Every histogram has this label.
        .filter(|label| *label != "le")
        .map(|label| format!("`{label}`"))
        .collect();
    let kind = match family.kind.unwrap() {
        Kind::Counter => "counter",
        Kind::Gauge => "gauge",
        Kind::Histogram => "histogram",
        Kind::Summary => "summary",
        Kind::Untyped => "untyped",
    };
    let labels: Vec<_> = labels.into_iter().collect();
    vec![
        format!("`{}`", family.name),
        kind.to_owned(),
        labels.join(", "),
        page::cell(family.help.as_ref().unwrap()),
    ]
}
