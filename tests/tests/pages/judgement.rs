//! Pages about the judgement of a Service, and about the effect of a change on it.

use std::fs;

use anyhow::Result;
use serde_json::Value;
use traffic_policy_testing::browser::{self, Browser, Look, Tab};

use crate::cluster::cluster;
use crate::{Case, assert_named, embedded, list, percent, pictures, table, texts};

const NODES: [&str; 4] = ["pool-1-a", "pool-1-b", "pool-1-c", "pool-1-d"];
const PODS: [(&str, &str); 4] = [
    ("web-x2k9q", "pool-1-a"),
    ("web-m4wzt", "pool-1-b"),
    ("web-q8vhn", "pool-1-b"),
    ("web-zz0aa", "pool-1-b"),
];

/// Compares all numbers of a page about a port with the JSON.
fn compare(tab: &mut Tab<'_>, printed: &Value) -> Result<()> {
    assert_eq!(&embedded(tab, "lb")?, printed);
    let port = &printed["services"][0]["ports"][0];
    let (mut nodes, mut edges) = (Vec::new(), Vec::new());
    for row in list(&port["rows"]) {
        let each = row["share"].as_f64().unwrap() / row["nodes"].as_f64().unwrap();
        for name in list(&row["names"]) {
            let share = percent(&each.into())?;
            nodes.push((name.as_str().unwrap().to_owned(), row["pods"].to_string(), share.clone()));
            if row["traffic"] == true {
                edges.push(share);
            }
        }
    }
    nodes.sort();
    edges.sort();
    let cells = table(tab, "Nodes of shop/web, http TCP IPv4")?;
    let shown: Vec<_> = cells.iter().map(|row| (row[0].clone(), row[1].clone(), row[7].clone())).collect();
    assert_eq!(shown, nodes);
    assert_eq!(texts(tab, ".map .to-node")?, edges);
    let mut pods = Vec::new();
    for pod in list(&port["pods"]) {
        pods.push((pod["pod"].as_str().unwrap().to_owned(), percent(&pod["share"])?));
    }
    pods.sort();
    let mut shares: Vec<_> = pods.iter().map(|(_, share)| share.clone()).collect();
    shares.sort();
    assert_eq!(texts(tab, ".map .pod-share")?, shares);
    let cells = if pods.is_empty() { Vec::new() } else { table(tab, "Pods of shop/web, http TCP IPv4")? };
    let mut shown: Vec<_> = cells.iter().map(|row| (row[0].clone(), row[3].clone())).collect();
    shown.sort();
    assert_eq!(shown, pods);
    let figures = texts(tab, ".figures dd")?;
    assert!(figures.contains(&percent(&port["lost"])?), "{figures:?}");
    assert!(figures.contains(&format!("{} of {}", port["healthy"], port["nodes"])), "{figures:?}");
    let found: Vec<_> =
        list(&printed["services"][0]["findings"]).iter().map(|one| one["code"].clone()).collect();
    let shown = tab.evaluate(
        "[...document.querySelectorAll('.findings li > p:first-child code')].map(one => one.textContent)",
    )?;
    assert_eq!(list(&shown), found);
    Ok(())
}

/// The share of requests that are local to nodes, forwarded or lost: edges add up to all requests.
fn edges(tab: &mut Tab<'_>, kind: &str) -> Result<f64> {
    let sum = tab.evaluate(&format!(
        "[...document.querySelectorAll('.map .edge{kind}[data-share]')].reduce((sum, edge) => sum + Number(edge.dataset.share), 0)"
    ))?;
    Ok(sum.as_f64().unwrap())
}

#[test]
fn numbers_are_those_of_the_json() -> Result<()> {
    let Some(mut browser) = Browser::start("numbers_are_those_of_the_json")? else { return Ok(()) };
    // The balancer; the forwarded and the lost share; the text on the page.
    let cases = [
        ("Local", "gke", &PODS[..], 0.0, 0.0, "Every request reaches a pod"),
        ("Cluster", "gke", &PODS[..], 0.75, 0.0, "Every request reaches a pod"),
        // No node is healthy: all of them get requests, and drop them.
        ("Local", "aws-nlb", &[("web-old", "elsewhere")][..], 0.0, 1.0, "100.0 % of the requests are lost"),
        ("Local", "azure", &[][..], 0.0, 0.0, "No node gets traffic: no request reaches a pod"),
    ];
    for (policy, balancer, pods, forwarded, lost, verdict) in cases {
        let case = Case::new(&cluster(&NODES, policy, pods).manifests())?;
        let printed = case.make(&["shop/web", "--balancer", balancer])?;
        let name = format!("lb-{policy}-{balancer}");
        let read = browser::judge(&mut browser, &case.page(), (pictures(), &name))?;
        assert_named(&read, "image", "Map of shop/web, http TCP IPv4");
        assert_named(&read, "table", "Nodes of shop/web, http TCP IPv4");
        assert_named(&read, "heading", "shop/web");
        let map = read.iter().find(|node| node.name.starts_with("Map of")).unwrap();
        assert!(map.description.contains("pool-1-c: "), "{map:?}");
        for look in [Look::DESKTOP, Look::PHONE] {
            let mut tab = browser.open(&case.page(), look)?;
            compare(&mut tab, &printed)?;
            assert_eq!(texts(&mut tab, ".verdict strong")?, [verdict]);
            let incoming = edges(&mut tab, ".forwarded")? / 2.0;
            assert!((incoming - forwarded).abs() < 1e-6, "{name}: {incoming} is forwarded");
            // Forwarded requests are animated where animations are enabled.
            let flows = tab.evaluate("document.getAnimations().length")?.as_u64().unwrap();
            assert_eq!(flows > 0, forwarded > 0.0 && !look.reduced_motion, "{name}: {flows} things move");
            let dropped = edges(&mut tab, ".lost")?;
            assert!((dropped - lost).abs() < 1e-6, "{name}: {dropped} is lost");
            let (healthy, unhealthy) = (
                texts(&mut tab, ".map .node.healthy")?.len(),
                texts(&mut tab, ".map .node.unhealthy")?.len(),
            );
            let port = &printed["services"][0]["ports"][0];
            assert_eq!(
                (healthy as u64, (healthy + unhealthy) as u64),
                (port["healthy"].as_u64().unwrap(), port["nodes"].as_u64().unwrap())
            );
        }
    }
    Ok(())
}

#[test]
fn names_are_never_markup() -> Result<()> {
    let Some(mut browser) = Browser::start("names_are_never_markup")? else { return Ok(()) };
    let (pod, node, drain) = (
        "web</script><script>window.hit = 1</script>",
        "\"'><img src=x onerror='window.hit = 1'>",
        "soon\"><svg onload=window.hit=1><!--",
    );
    let mut cluster = cluster(&["n1", node], "Local", &[(pod, node), ("web-1", "n1")]);
    cluster.drain = drain;
    let case = Case::new(&cluster.manifests())?;
    let printed = case.make(&["shop/web"])?;
    browser::judge(&mut browser, &case.page(), (pictures(), "lb-hostile"))?;
    let mut tab = browser.open(&case.page(), Look::DESKTOP)?;
    compare(&mut tab, &printed)?;
    assert_eq!(
        tab.evaluate("[window.hit ?? 0, document.images.length, document.scripts.length]")?,
        serde_json::json!([0, 0, 2])
    );
    let shown = tab.evaluate("document.body.innerText")?;
    for text in [pod, node, "><svg onload=window.hit=1><!--"] {
        assert!(shown.as_str().unwrap().contains(text), "{text} is not in {shown}");
    }
    Ok(())
}

#[test]
fn before_and_after_stand_beside_each_other() -> Result<()> {
    let Some(mut browser) = Browser::start("before_and_after_stand_beside_each_other")? else {
        return Ok(());
    };
    let case = Case::new(&cluster(&NODES, "Cluster", &PODS).manifests())?;
    let printed = case.make(&[
        "what-if",
        "shop/web",
        "--policy",
        "Local",
        "--drain",
        "1s",
        "--balancer",
        "gke",
        "--rate",
        "10",
    ])?;
    let read = browser::judge(&mut browser, &case.page(), (pictures(), "lb-what-if"))?;
    for when in ["before", "after"] {
        assert_named(&read, "image", &format!("Map of shop/web {when}, http TCP IPv4"));
    }
    assert_named(&read, "table", "Nodes before and after");
    let mut tab = browser.open(&case.page(), Look::DESKTOP)?;
    assert_eq!(embedded(&mut tab, "what-if")?, printed);
    assert_eq!(embedded(&mut tab, "lb")?["services"][0]["external_policy"], "Cluster");
    assert_eq!(embedded(&mut tab, "after")?["services"][0]["external_policy"], "Local");
    let mut expected = Vec::new();
    for pod in list(&printed["pods"]) {
        expected.push(vec![
            pod["pod"].as_str().unwrap().to_owned(),
            percent(&pod["before"])?,
            percent(&pod["after"])?,
        ]);
    }
    assert_eq!(table(&mut tab, "Pods before and after")?, expected);
    let costs = texts(&mut tab, ".cost li")?.join("\n");
    let requests = format!("= {:.0} requests", printed["lost_requests"].as_f64().unwrap());
    assert!(costs.contains(&requests), "no {requests} in {costs}");
    let places = "[...document.querySelectorAll('.map')].map(map => map.getBoundingClientRect()).map(({ left, top }) => [left, top])";
    let apart = tab.evaluate(places)?;
    assert!(apart[0][0].as_f64() < apart[1][0].as_f64(), "{apart}");
    let mut tab = browser.open(&case.page(), Look::PHONE)?;
    let below = tab.evaluate(places)?;
    assert!(below[0][1].as_f64() < below[1][1].as_f64() && below[0][0] == below[1][0], "{below}");
    Ok(())
}

#[test]
fn a_page_is_replaced_or_left_as_it_was() -> Result<()> {
    let case = Case::new(&cluster(&NODES, "Local", &PODS).manifests())?;
    fs::write(case.page(), "old")?;
    case.make(&["shop/web"])?;
    assert!(fs::read_to_string(case.page())?.contains("</html>"));
    let missing = case.page().with_file_name("missing").join("page.html");
    let output = case.start(&["shop/web"], &missing)?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("there is no folder") && output.stdout.is_empty(), "{said}");
    let names: Vec<_> =
        fs::read_dir(case.folder.path())?.map(|entry| Ok(entry?.file_name())).collect::<Result<_>>()?;
    assert_eq!(names.len(), 2, "{names:?}");
    Ok(())
}
