//! A large cluster: the page stays small, and nodes that are alike share one element.

use std::fs;

use anyhow::Result;
use traffic_policy_testing::browser::{self, Browser, Look};

use crate::cluster::Cluster;
use crate::{Case, pictures, texts};

const NODES: usize = 5_000;
const PODS: usize = 1_000;

#[test]
fn five_thousand_nodes_are_a_few_boxes() -> Result<()> {
    let Some(mut browser) = Browser::start("five_thousand_nodes_are_a_few_boxes")? else { return Ok(()) };
    let nodes: Vec<_> = (0..NODES)
        .map(|at| format!("ip-10-0-{}-{}.eu-west-1.compute.internal", at / 250, at % 250))
        .collect();
    // One or two pods on each of 600 nodes.
    let pods = (0..PODS).map(|at| (format!("web-{at:04}"), nodes[at % 600 * 3].clone(), true)).collect();
    let cluster = Cluster { nodes, policy: "Local", drain: "60s", pods };
    let case = Case::new(&cluster.manifests())?;
    let printed = case.make(&["shop/web", "--balancer", "gke"])?;
    assert_eq!(printed["services"][0]["ports"][0]["pods"].as_array().unwrap().len(), PODS);
    let size = fs::metadata(case.page())?.len();
    assert!(size < 600_000, "{size} bytes");
    browser::judge(&mut browser, &case.page(), (pictures(), "lb-large"))?;
    let mut tab = browser.open(&case.page(), Look::PHONE)?;
    let names = texts(&mut tab, ".map .node .name")?;
    assert_eq!(names, ["200 nodes", "4,400 nodes", "400 nodes"]);
    let elements = tab.evaluate("document.querySelectorAll('*').length")?;
    assert!(elements.as_u64().unwrap() < 2_000, "{elements} elements");
    // Rows that are not shown at first appear on request.
    let rows = "document.querySelectorAll('table')[1].tBodies[0].rows.length";
    let before = tab.evaluate(rows)?;
    tab.evaluate("document.querySelectorAll('.more').forEach(button => button.click())")?;
    let after = tab.evaluate(rows)?;
    assert!(before.as_u64().unwrap() < 100 && after == PODS, "{before}, {after}");
    Ok(())
}
