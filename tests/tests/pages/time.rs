//! The time line of a simulation, with made-up numbers.

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use traffic_policy_lb::page::{Event, Page, Part, Second, Timeline};
use traffic_policy_testing::browser::{self, Browser, Look};

use crate::{Case, assert_named, cluster::Cluster, pictures, table, texts};

#[test]
fn a_time_line_is_drawn_if_it_is_given() -> Result<()> {
    let Some(mut browser) = Browser::start("a_time_line_is_drawn_if_it_is_given")? else { return Ok(()) };
    let seconds: Vec<_> = (0..40)
        .map(|second| match second {
            10..14 => Second { ok: 75, delayed: 0, lost: 20, cut: 5 },
            _ => Second { ok: 97, delayed: 3, lost: 0, cut: 0 },
        })
        .collect();
    let happened = |second, what: &str| Event { second, what: what.to_owned() };
    let events =
        vec![happened(10.0, "node <b>a</b> is preempted"), happened(14.2, "the balancer gives it up")];
    let line = Timeline { title: "preemption, gke, 100 requests a second".to_owned(), seconds, events };
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("page.html");
    Page::new("Preemption").with(Part::Timeline, &line)?.write(&file)?;
    let read = browser::judge(&mut browser, &file, (pictures(), "time-line"))?;
    assert_named(&read, "image", "Time line of preemption, gke, 100 requests a second");
    let mut tab = browser.open(&file, Look::DESKTOP)?;
    let legend = texts(&mut tab, "figure.time figcaption span")?;
    assert_eq!(legend, ["answered: 3,792", "cut: 20", "delayed: 108", "lost: 80"]);
    let rows = table(&mut tab, "Requests of each second")?;
    assert_eq!(rows.len(), 40);
    assert_eq!(rows[12], ["12", "75", "0", "20", "5"]);
    // The heights of the bars are proportional to the numbers of requests.
    let tall = "['ok', 'lost', 'cut', 'delayed'].map(kind => [...document.querySelectorAll('svg.time rect.' + kind)]\
                .reduce((sum, bar) => sum + Number(bar.getAttribute('height')), 0))";
    let tall = tab.evaluate(tall)?;
    let [ok, lost, cut, delayed] = [0, 1, 2, 3].map(|at| tall[at].as_f64().unwrap());
    assert!((lost / ok - 80.0 / 3792.0).abs() < 1e-3 && (cut / lost - 0.25).abs() < 1e-2, "{tall}");
    assert!((delayed / ok - 108.0 / 3792.0).abs() < 1e-3, "{tall}");
    assert!(texts(&mut tab, "ol li")?[0].contains("node <b>a</b> is preempted"));

    Page::new("nothing").with(Part::Judged, &json!({"nodes": 0, "services": []}))?.write(&file)?;
    let mut tab = browser.open(&file, Look::DESKTOP)?;
    assert_eq!(tab.evaluate("document.querySelectorAll('.time').length")?, 0);
    assert_eq!(tab.console, Vec::<String>::new());
    Ok(())
}

/// A simulation's page has the numbers of its JSON.
#[test]
fn a_simulation_is_drawn() -> Result<()> {
    let Some(mut browser) = Browser::start("a_simulation_is_drawn")? else { return Ok(()) };
    let pod = |name: &str, node: &str| (name.to_owned(), node.to_owned(), true);
    let cluster = Cluster {
        nodes: ["pool-1-a", "pool-1-b", "pool-1-c"].map(str::to_owned).to_vec(),
        policy: "Cluster",
        drain: "10s",
        pods: vec![pod("web-x2k9q", "pool-1-a"), pod("web-m4wzt", "pool-1-b")],
    };
    let case = Case::new(&cluster.manifests())?;
    let words = ["simulate", "web", "--balancer", "gke", "--event", "5s policy=Local", "--for", "50s"];
    let output = case.start(&words, &case.page())?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let document: Value = serde_json::from_slice(&output.stdout)?;
    browser::judge(&mut browser, &case.page(), (pictures(), "simulated"))?;
    let mut tab = browser.open(&case.page(), Look::DESKTOP)?;
    let rows = table(&mut tab, "Requests of each second")?;
    let seconds = document["seconds"].as_array().unwrap();
    assert_eq!(rows.len(), seconds.len());
    for (row, second) in rows.iter().zip(seconds) {
        let number = |field: &str| second[field].as_u64().unwrap().to_string();
        assert_eq!(row[1..], [number("ok"), number("delayed"), number("lost"), number("cut")], "{second}");
    }
    assert!(document["total"]["lost"].as_u64().unwrap() > 0, "{}", document["total"]);
    // What is said first is what became of the requests, not what a judgement of the start says.
    let total = |kind: &str| document["total"][kind].as_u64().unwrap();
    let all = total("ok") + total("delayed") + total("lost") + total("cut");
    let verdict = texts(&mut tab, ".verdict strong")?;
    assert_eq!(verdict, [format!("{} of {} requests are lost", grouped(total("lost")), grouped(all))]);
    let beside = texts(&mut tab, ".verdict span")?;
    assert!(beside[0].contains("At the start: Every request reaches a pod"), "{beside:?}");
    let happened = texts(&mut tab, "ol li")?;
    assert!(happened.iter().any(|line| line.contains("externalTrafficPolicy Local")), "{happened:?}");
    assert!(!table(&mut tab, "Nodes of shop/web, http TCP IPv4")?.is_empty());
    Ok(())
}

/// Formats a number below a million as the page does: `12,345`.
fn grouped(number: u64) -> String {
    match (number / 1000, number % 1000) {
        (0, rest) => rest.to_string(),
        (thousands, rest) => format!("{thousands},{rest:03}"),
    }
}
