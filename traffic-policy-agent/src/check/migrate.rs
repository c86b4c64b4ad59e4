//! Findings of `check --migrate`: what kube-proxy does on this node, what will differ, the steps,
//! and how to go back.

use std::{fs, io, path::Path};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use traffic_policy_cluster::model::Protocol;
use traffic_policy_dataplane::node::{
    Ipvs, Network, conntrack, ipvs,
    nftables::{Family, Rules},
};

use super::Finding;

const PROBE: &str = "migrate";

/// The fields of kube-proxy's configuration that determine what will differ.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct KubeProxyConfig {
    mode: Option<String>,
    node_port_addresses: Option<Vec<String>>,
    iptables: BackendConfig,
    nftables: BackendConfig,
    ipvs: IpvsConfig,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct BackendConfig {
    masquerade_all: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct IpvsConfig {
    scheduler: Option<String>,
}

/// Facts that the findings are made from.
#[derive(Clone, Debug)]
struct Facts {
    config: Option<KubeProxyConfig>,
    rules: Rules,
    /// Programs of iptables-legacy whose table nat is in use.
    legacy: Vec<&'static str>,
    /// Whether kube-ipvs0, the device of kube-proxy in mode ipvs, exists.
    kube_ipvs: bool,
    /// Table of ipvs, if it serves anything, or the reason why it cannot be read.
    ipvs: Result<Option<Ipvs>, String>,
    /// Number of TCP connections and of UDP flows that conntrack translates, or the reason why it
    /// cannot be read.
    connections: Result<[usize; 2], String>,
    devices: Vec<String>,
    /// Names of running processes.
    processes: Vec<String>,
}

/// Inspects what kube-proxy does here. `config` is its configuration, or the ConfigMap with it.
pub async fn migration(config: Option<&Path>) -> Result<Vec<Finding>> {
    let config = config.map(read_config).transpose()?;
    let (network, _events) = Network::connect()?;
    let devices: Vec<_> = network.links().await?.into_iter().map(|link| link.name).collect();
    Ok(judge(&Facts {
        config,
        rules: Rules::read().context("the rules of nftables cannot be read: run `check` as root")?,
        legacy: super::netfilter::legacy_nat(),
        kube_ipvs: devices.iter().any(|name| name == ipvs::DEVICE),
        ipvs: Ipvs::read().map_err(|error| error.to_string()),
        connections: connections().map_err(|error| error.to_string()),
        devices,
        processes: processes(),
    }))
}

fn connections() -> io::Result<[usize; 2]> {
    let live: Vec<_> = conntrack::translated()?.into_iter().filter(|connection| !connection.over).collect();
    let tcp = live.iter().filter(|connection| connection.protocol == Protocol::Tcp).count();
    Ok([tcp, live.len() - tcp])
}

fn processes() -> Vec<String> {
    let names = fs::read_dir("/proc").into_iter().flatten().flatten();
    let names = names.filter(|entry| {
        entry.file_name().to_str().is_some_and(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
    });
    names
        .filter_map(|entry| fs::read_to_string(entry.path().join("comm")).ok())
        .map(|name| name.trim_end().to_owned())
        .collect()
}

fn read_config(path: &Path) -> Result<KubeProxyConfig> {
    let text = fs::read_to_string(path).with_context(|| format!("{} cannot be read", path.display()))?;
    parse_config(&text).with_context(|| format!("{} is no configuration of kube-proxy", path.display()))
}

/// Parses a KubeProxyConfiguration, or the ConfigMap that kubeadm makes.
fn parse_config(text: &str) -> Result<KubeProxyConfig> {
    let value: serde_yaml_ng::Value = serde_yaml_ng::from_str(text)?;
    match value.get("kind").and_then(serde_yaml_ng::Value::as_str) {
        Some("KubeProxyConfiguration") => Ok(serde_yaml_ng::from_value(value)?),
        Some("ConfigMap") => {
            let inner = value.get("data").and_then(|data| data.get("config.conf"));
            let inner = inner.and_then(serde_yaml_ng::Value::as_str);
            let inner = inner.context("the ConfigMap has no `config.conf`: take the one named kube-proxy")?;
            Ok(serde_yaml_ng::from_str(inner)?)
        }
        Some(kind) => bail!("its kind is {kind}, not KubeProxyConfiguration or ConfigMap"),
        None => bail!("it has no `kind`"),
    }
}

fn judge(facts: &Facts) -> Vec<Finding> {
    let backends = backends(facts);
    let mut findings = vec![if backends.is_empty() {
        Finding::ok(PROBE, "no rules of kube-proxy are in this network namespace")
    } else {
        Finding::note(
            PROBE,
            format!("kube-proxy's rules are here: {}", backends.join("; ")),
            "start with `run --adopt` while they are, and remove them afterwards",
        )
    }];
    findings.push(match &facts.connections {
        Ok([tcp, udp]) => Finding::ok(
            PROBE,
            format!("{tcp} TCP connections and {udp} UDP flows go through a translation by conntrack now"),
        ),
        Err(error) => Finding::error(
            PROBE,
            format!("the connections that conntrack holds cannot be read: {error}"),
            "run as root; load the module nf_conntrack_netlink. Without it --adopt refuses, and connections end with the rules",
        ),
    });
    findings.extend(differences(facts));
    if facts.in_mode_ipvs() {
        findings.push(Finding::note(
            PROBE,
            "the steps in mode ipvs: 1. drain the node, until the number of established connections above is 0; 2. keep kube-proxy's pod off it; 3. `run --adopt`, for what its rules of iptables translate beside ipvs; 4. `kube-proxy --cleanup`, which removes the virtual servers and kube-ipvs0; 5. uncordon",
            "the way back: start kube-proxy, wait for its virtual servers in /proc/net/ip_vs, stop the agent, `traffic-policy-agent cleanup`. What came from outside under the agent ends, as ipvs knows nothing of it; with the node drained before, that is nothing (docs/migrate.md)",
        ));
        return findings;
    }
    findings.push(Finding::note(
        PROBE,
        "the steps: 1. keep kube-proxy's pod off this node, its rules stay; 2. `run --adopt`, and wait for \"adopted\" in the log; 3. `kube-proxy --cleanup`",
        "the way back: start kube-proxy, wait for its rules, stop the agent, `traffic-policy-agent cleanup`: what began under kube-proxy goes on, what came from outside since ends (docs/migrate.md)",
    ));
    findings
}

impl Facts {
    fn in_mode_ipvs(&self) -> bool {
        let configured = self.config.as_ref().and_then(|config| config.mode.as_deref()) == Some("ipvs");
        self.kube_ipvs || configured
    }
}

/// Returns the backends that have rules, each with its number of Service ports.
fn backends(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    for family in [Family::Ip, Family::Ip6] {
        let of = |table: &str, prefix: &str| {
            let chains = facts.rules.chains.iter();
            let chains = chains.filter(|chain| chain.table.family == family && chain.table.name == table);
            chains.filter(|chain| chain.name.starts_with(prefix)).count()
        };
        let table =
            facts.rules.tables.iter().find(|table| table.family == family && table.name == "kube-proxy");
        if table.is_some() {
            // A chain of all Services begins as those of each do.
            let ports = of("kube-proxy", "service-") - of("kube-proxy", "service-endpoints-check");
            found.push(format!("nftables, table {family} kube-proxy, {ports} Service ports with endpoints"));
        }
        if of("nat", "KUBE-SERVICES") > 0 {
            let command = if family == Family::Ip { "iptables-nft" } else { "ip6tables-nft" };
            found.push(format!("{command}, {} Service ports with endpoints", of("nat", "KUBE-SVC-")));
        }
    }
    for command in &facts.legacy {
        found.push(format!(
            "{command}-legacy has a table nat, which only it can read: `{command}-legacy -t nat -S | grep -c '^-N KUBE-SVC'` counts Service ports"
        ));
    }
    if facts.kube_ipvs {
        found.push("ipvs, by the device kube-ipvs0".to_owned());
    }
    found
}

fn differences(facts: &Facts) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut warn = |found: &str, fix: &str| findings.push(Finding::warning(PROBE, found, fix));
    let config = facts.config.clone().unwrap_or_default();
    let mode = config.mode.as_deref().unwrap_or_default();
    if facts.in_mode_ipvs() {
        let held = match &facts.ipvs {
            Ok(Some(ipvs)) => format!(" ({ipvs})"),
            Ok(None) => " (/proc/net/ip_vs lists none)".to_owned(),
            Err(error) => format!(" (how many, /proc/net/ip_vs does not tell: {error})"),
        };
        warn(
            &format!(
                "in mode ipvs connections are held by ipvs, not by conntrack{held}: they cannot be adopted, and end when its virtual servers are removed; UDP flows from outside get an endpoint anew when the agent starts"
            ),
            "drain the node before, or let connections end first",
        );
    }
    if let Some(scheduler) =
        config.ipvs.scheduler.filter(|name| !name.is_empty() && name != "rr" && mode == "ipvs")
    {
        warn(
            &format!(
                "the ipvs scheduler {scheduler} is not served: endpoints are chosen at random, each alike"
            ),
            "nothing, if no Service depends on it",
        );
    }
    if mode != "nftables"
        && facts.config.is_some()
        && config.node_port_addresses.as_ref().is_none_or(Vec::is_empty)
    {
        warn(
            "node ports were reached on all addresses of the node; here, as in mode nftables, on those of the Node object",
            "`run --node-port-addresses all` if clients use others",
        );
    }
    if config.iptables.masquerade_all || config.nftables.masquerade_all {
        warn(
            "masqueradeAll is on: here pods see the addresses of clients in the cluster",
            "see whether network policies or pods depend on the node's address as source",
        );
    }
    if facts.devices.iter().any(|name| name == "nodelocaldns") {
        warn(
            "NodeLocal DNSCache is here (device nodelocaldns): it binds the ClusterIP of DNS, and sockets' calls are translated before they reach it",
            "let pods ask its link-local address (kubelet --cluster-dns), or do without the cache",
        );
    }
    let runs = |names: &[&str]| {
        facts.processes.iter().any(|process| names.iter().any(|name| process.starts_with(name)))
    };
    if runs(&["pilot-agent", "ztunnel", "envoy"]) {
        warn(
            "Istio or another mesh is here: its redirection in pods sees endpoints' addresses where socket hooks have translated, no ClusterIPs",
            "`run --cgroup none` if routing by Service names depends on it, with `--pod-services on` for ClusterIPs of pods",
        );
    }
    if runs(&["kata-", "cloud-hypervis", "firecracker", "qemu-system", "runsc", "virt-launcher"]) {
        warn(
            "pods in virtual machines or with a kernel of their own are here (Kata, gVisor, KubeVirt): socket hooks do not see their calls, so their connections to ClusterIPs are not served",
            "`run --pod-services on` serves them at their devices",
        );
    }
    if findings.is_empty() {
        findings.push(Finding::ok(
            PROBE,
            "nothing was found that would differ (looked for: NodeLocal DNSCache, a mesh, Kata, gVisor, KubeVirt, kube-proxy's settings if given)",
        ));
    }
    findings
}

#[cfg(test)]
mod tests {
    use traffic_policy_dataplane::node::nftables::{Chain, Table};

    use super::*;
    use crate::check::Severity;

    fn texts(facts: &Facts) -> Vec<String> {
        judge(facts).into_iter().map(|finding| finding.found).collect()
    }

    fn facts() -> Facts {
        Facts {
            config: None,
            rules: Rules::default(),
            legacy: Vec::new(),
            kube_ipvs: false,
            ipvs: Ok(None),
            connections: Ok([0, 0]),
            devices: Vec::new(),
            processes: Vec::new(),
        }
    }

    #[test]
    fn back_ends_and_their_service_ports() {
        let chain = |family, table: &str, name: &str| Chain {
            table: Table { family, name: table.into() },
            name: name.into(),
            forward: false,
            drops: false,
            source_nat: false,
            in_use: true,
        };
        let rules = Rules {
            tables: vec![Table { family: Family::Ip6, name: "kube-proxy".into() }],
            chains: vec![
                chain(Family::Ip6, "kube-proxy", "service-ABC"),
                chain(Family::Ip6, "kube-proxy", "services"),
                chain(Family::Ip, "nat", "KUBE-SERVICES"),
                chain(Family::Ip, "nat", "KUBE-SVC-A"),
                chain(Family::Ip, "nat", "KUBE-SVC-B"),
            ],
        };
        let facts =
            Facts { rules, legacy: vec!["ip6tables"], kube_ipvs: true, connections: Ok([3, 4]), ..facts() };
        let texts = texts(&facts);
        for text in [
            "iptables-nft, 2 Service ports",
            "table ip6 kube-proxy, 1 Service ports",
            "ip6tables-legacy -t nat -S",
            "kube-ipvs0",
        ] {
            assert!(texts[0].contains(text), "{text}: {texts:?}");
        }
        assert!(texts[1].starts_with("3 TCP connections and 4 UDP flows"), "{texts:?}");
        assert!(texts.iter().any(|text| text.contains("cannot be adopted")), "{texts:?}");
    }

    #[test]
    fn connections_of_ipvs_and_the_way_back() {
        let with = |ipvs| judge(&Facts { kube_ipvs: true, ipvs, ..facts() });
        let held = Ipvs { virtual_servers: 9, active: 12, inactive: 3 };
        for (ipvs, said) in [
            (Ok(Some(held)), "ipvs holds 12 established TCP connections and 3 others"),
            (Ok(None), "lists none"),
            (Err("no".into()), "does not tell: no"),
        ] {
            let findings = with(ipvs);
            let ending = findings.iter().find(|finding| finding.found.contains(said)).unwrap();
            assert!(ending.severity == Severity::Warning && ending.found.contains("cannot be adopted"));
            let steps = findings.last().unwrap();
            assert!(steps.found.contains("drain the node"), "{steps:?}");
            assert!(steps.fix.as_ref().unwrap().contains("/proc/net/ip_vs"), "{steps:?}");
        }
        // ipvs tables of other users (keepalived) are not kube-proxy's.
        let other = judge(&Facts { ipvs: Ok(Some(held)), ..facts() });
        assert!(!other.iter().any(|finding| finding.found.contains("ipvs")), "{other:?}");
        let configured = KubeProxyConfig { mode: Some("ipvs".into()), ..KubeProxyConfig::default() };
        let texts = texts(&Facts { config: Some(configured), ..facts() });
        assert!(texts.last().unwrap().starts_with("the steps in mode ipvs"), "{texts:?}");
    }

    #[test]
    fn a_node_without_anything() {
        let findings = judge(&facts());
        assert!(findings.iter().all(|finding| finding.severity <= Severity::Note), "{findings:?}");
        let blind = judge(&Facts { connections: Err("no".into()), ..facts() });
        assert!(blind.iter().any(|finding| finding.severity == Severity::Error), "{blind:?}");
    }

    #[test]
    fn what_will_differ_is_named() {
        let text = "apiVersion: v1\nkind: ConfigMap\ndata:\n  config.conf: |-\n    apiVersion: kubeproxy.config.k8s.io/v1alpha1\n    \
            kind: KubeProxyConfiguration\n    mode: \"\"\n    nodePortAddresses: null\n    iptables: {masqueradeAll: true}\n";
        let facts = Facts {
            config: Some(parse_config(text).unwrap()),
            devices: vec!["nodelocaldns".into()],
            processes: vec!["pilot-agent".into(), "runsc-sandbox".into()],
            ..facts()
        };
        let texts = texts(&facts);
        for text in ["all addresses of the node", "masqueradeAll", "NodeLocal DNSCache", "Istio", "gVisor"] {
            assert!(texts.iter().any(|found| found.contains(text)), "{text}: {texts:?}");
        }
    }

    #[test]
    fn configurations_that_are_none() {
        for (text, said) in [
            ("kind: Service", "its kind is Service"),
            ("a: 1", "it has no `kind`"),
            ("kind: ConfigMap\ndata: {}", "no `config.conf`"),
            ("kind: KubeProxyConfiguration\nmode: [", ""),
        ] {
            let error = format!("{:#}", parse_config(text).unwrap_err());
            assert!(error.contains(said), "{text}: {error}");
        }
        let config = parse_config("kind: KubeProxyConfiguration\nmode: ipvs\nipvs: {scheduler: lc}").unwrap();
        let facts = Facts { config: Some(config), ..facts() };
        assert!(texts(&facts).iter().any(|text| text.contains("scheduler lc")), "{:?}", texts(&facts));
    }
}
