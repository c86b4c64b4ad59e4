//! `--notice file:PATH`, and what it costs nothing of: connections, probes, settings.

use std::fs;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::Lab;

use crate::fixture::{PATIENCE, expect_leaving, expect_staying, node_with, web};

#[test]
fn a_file_tells_load_balancers_and_its_removal_takes_it_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("leaving");
    let flag = format!("file:{}", path.display());
    let cluster = node_with(&["--notice", &flag], |_| Vec::new());
    let agent = &cluster.agents[0];
    expect_staying(&cluster, agent, 1);
    let metric = || agent.scrape().unwrap().value("traffic_policy_leaving", &[]).unwrap();
    assert_eq!(metric(), 0.0);

    fs::write(&path, "rack 7 is switched off\n").unwrap();
    let leaving = expect_leaving(&cluster, agent, 1);
    assert_eq!(leaving["reason"], format!("{flag}: rack 7 is switched off"));
    assert_eq!(leaving.get("goneBy"), None);
    assert_eq!(metric(), 1.0);
    agent.wait_said(&["WARN", "about to go", "rack 7"], PATIENCE).unwrap();
    let status = agent.command(&["status"]).unwrap();
    let status = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(status.contains("rack 7") && status.contains("in sync"), "{status}");

    fs::remove_file(&path).unwrap();
    expect_staying(&cluster, agent, 1);
    let configz = agent.ask_metrics("/configz").unwrap().body;
    assert!(configz.contains(&flag), "{configz}");
}

#[test]
fn a_restarted_agent_says_so_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("leaving");
    let flag = format!("file:{}", path.display());
    let mut cluster = node_with(&["--notice", &flag], |_| Vec::new());
    fs::write(&path, "").unwrap();
    expect_leaving(&cluster, &cluster.agents[0], 1);
    cluster.agents[0].stop().unwrap();
    cluster.agents[0].start_again().unwrap();
    expect_leaving(&cluster, &cluster.agents[0], 1);
    let log = cluster.agents[0].log();
    assert_eq!(log.matches("this node is about to go").count(), 2, "{log}");
}

#[test]
fn sources_that_do_not_exist_are_refused_by_name() {
    let cluster = Cluster::start(Lab::builder().pods(&[0])).unwrap();
    cluster.manifests.apply(&web(), &[]).unwrap();
    for (flags, fault) in [
        (["--notice", "gcp"], "is no source of news"),
        (["--notice", "file:leaving"], "no absolute path"),
        (["--announce-leaving", "kube-system"], "cannot be used with"),
    ] {
        let builder = Agent::builder(&cluster.lab, cluster.lab.node(1));
        let mut agent = builder.flags(&flags).start().unwrap();
        assert_eq!(agent.wait_ended(PATIENCE).unwrap(), Some(2), "{flags:?}");
        assert!(agent.log().contains(fault), "{flags:?}: {}", agent.log());
    }
}
