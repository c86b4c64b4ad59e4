//! A `--config` file that cannot be used: exit code 2, a message with the field and the valid
//! values, and the node left as it was.

use std::fs;
use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::attached::Attached;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::Lab;

const SOON: Duration = Duration::from_secs(20);
const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

#[test]
fn wrong_files_exit_with_2_and_leave_the_node_alone() {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let pins = cluster.lab.bpffs().join("node-1");
    let file = cluster.lab.logs().join("config.conf");
    let path = file.display().to_string();
    for (text, texts) in [
        (format!("{HEAD}conntrack: {{udpTimeout: soon}}"), &["conntrack.udpTimeout is \"soon\"", "30s"][..]),
        (format!("{HEAD}healthzBindAddress: here"), &["healthzBindAddress is \"here\"", "0.0.0.0:10256"]),
        (format!("{HEAD}nodePortAddresses: all"), &["nodePortAddresses is \"all\"", "[all]"]),
        ("apiVersion: v1\nkind: ConfigMap".to_owned(), &["a ConfigMap", "config.conf"]),
        ("mode: [".to_owned(), &["one YAML document of kind KubeProxyConfiguration"]),
    ] {
        fs::write(&file, &text).unwrap();
        let mut agent =
            Agent::builder(&cluster.lab, cluster.lab.node(1)).flags(&["--config", &path]).start().unwrap();
        let code = agent.wait_ended(SOON).unwrap();
        let log = agent.log();
        let message =
            log.lines().rfind(|line| line.starts_with("traffic-policy-agent: ")).unwrap_or_default();
        assert_eq!(code, Some(2), "{text}: {log}");
        for text in texts.iter().copied().chain([path.as_str()]) {
            assert!(message.contains(text), "no {text:?} in {message:?}\n{log}");
        }
        let attached = cluster.lab.node(1).netns().attached("eth0").unwrap();
        assert_eq!(attached, Attached::default());
        assert!(!pins.exists(), "{} is left", pins.display());
        // `check` reports the same.
        let checked = agent.command(&["check", "--config", &path]).unwrap();
        assert_eq!(checked.status.code(), Some(2), "{checked:?}");
        assert!(String::from_utf8_lossy(&checked.stderr).contains(texts[0]), "{checked:?}");
    }
    let mut missing = Agent::builder(&cluster.lab, cluster.lab.node(1))
        .flags(&["--config", "/nowhere/config.conf"])
        .start()
        .unwrap();
    assert_eq!(missing.wait_ended(SOON).unwrap(), Some(2), "{}", missing.log());
    assert!(missing.log().contains("/nowhere/config.conf: No such file"), "{}", missing.log());
}

#[test]
fn a_file_without_a_name_for_the_node() {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let file = cluster.lab.logs().join("config.conf");
    fs::write(&file, format!("{HEAD}hostnameOverride: \"\"\n")).unwrap();
    let mut agent = Agent::builder(&cluster.lab, cluster.lab.node(1))
        .without_name()
        .flags(&["--config", file.to_str().unwrap()])
        .start()
        .unwrap();
    assert_eq!(agent.wait_ended(SOON).unwrap(), Some(2), "{}", agent.log());
    for text in ["--node-name", "TRAFFIC_POLICY_NODE_NAME", "hostnameOverride"] {
        assert!(agent.log().contains(text), "{}", agent.log());
    }
}
