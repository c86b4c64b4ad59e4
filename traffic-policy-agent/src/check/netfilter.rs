//! Findings about the firewall: a FORWARD policy of DROP, and rules that kube-proxy has left
//! behind.

use std::{collections::BTreeSet, fs};

use traffic_policy_dataplane::node::nftables::{Chain, Family, Rules, Table};

use super::Finding;

/// Facts that the findings are made from.
#[derive(Clone, Debug, Default)]
struct Facts {
    rules: Rules,
    /// Tables of iptables-legacy, by `iptables` or `ip6tables`; their rules cannot be read here.
    legacy: Vec<(&'static str, Vec<String>)>,
    /// Whether kube-ipvs0 exists.
    ipvs: bool,
    /// Processes of kube-proxy in this network namespace.
    running: Vec<u32>,
}

/// Inspects the firewall; `devices` are the names of all devices.
pub(super) fn look(devices: &[String]) -> Vec<Finding> {
    let rules = match Rules::read() {
        Ok(rules) => rules,
        Err(error) => {
            return vec![Finding::warning(
                "forward-policy",
                format!("the rules of nftables could not be read: {error}"),
                "run `check` as root",
            )];
        }
    };
    let facts = Facts {
        rules,
        legacy: legacy(),
        ipvs: devices.iter().any(|name| name == "kube-ipvs0"),
        running: kube_proxies(),
    };
    judge(&facts)
}

/// Returns the chains that drop forwarded packets unless a rule accepts them, each with the rules
/// to add: packets for endpoints on this node are delivered through the stack and are dropped
/// there. Empty if there are none, or if they cannot be read.
///
/// Blocks for two short netlink dumps.
#[must_use]
pub fn forward_policy_drop() -> Vec<Finding> {
    Rules::read().map(|rules| forward_drops(&rules)).unwrap_or_default()
}

/// Whether rules of kube-proxy exist, as far as nf_tables shows: those of iptables-legacy cannot be
/// read.
///
/// Blocks for two short netlink dumps.
#[must_use]
pub fn kube_proxy_has_rules() -> bool {
    let Ok(rules) = Rules::read() else { return true };
    !kube_proxy(&Facts { rules, ..Facts::default() }).is_empty()
}

/// Returns the programs of iptables-legacy whose table nat is in use.
pub(super) fn legacy_nat() -> Vec<&'static str> {
    let has_nat = |tables: &[String]| tables.iter().any(|table| table == "nat");
    legacy().into_iter().filter(|(_, tables)| has_nat(tables)).map(|(command, _)| command).collect()
}

/// Returns the tables of iptables-legacy in use. Only root may read the list; without the module
/// there is none.
fn legacy() -> Vec<(&'static str, Vec<String>)> {
    [("iptables", "ip_tables_names"), ("ip6tables", "ip6_tables_names")]
        .into_iter()
        .filter_map(|(command, file)| {
            let text = fs::read_to_string(format!("/proc/self/net/{file}")).ok()?;
            let tables: Vec<_> = text.lines().map(str::to_owned).collect();
            (!tables.is_empty()).then_some((command, tables))
        })
        .collect()
}

fn kube_proxies() -> Vec<u32> {
    let own = fs::read_link("/proc/self/ns/net").ok();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let is_it = |process: &u32| {
        fs::read_to_string(format!("/proc/{process}/comm")).is_ok_and(|name| name.trim_end() == "kube-proxy")
            && fs::read_link(format!("/proc/{process}/ns/net")).ok() == own
    };
    processes.filter(is_it).collect()
}

fn judge(facts: &Facts) -> Vec<Finding> {
    let mut findings = kube_proxy(facts);
    if findings.is_empty() {
        findings.push(Finding::ok(KUBE_PROXY, "nothing of kube-proxy is here"));
    }
    let mut forward = forward_drops(&facts.rules);
    forward.extend(facts.legacy.iter().filter(|(_, tables)| tables.iter().any(|table| table == "filter")).map(
        |(command, _)| {
            Finding::note(
                "forward-policy",
                format!("{command}-legacy has rules, which only it can read; its FORWARD chain may drop packets to pods of this node"),
                format!(
                    "look with `{command}-legacy -S FORWARD`; if it says -P FORWARD DROP: {}",
                    iptables(&format!("{command}-legacy"), "FORWARD").join("; ")
                ),
            )
        },
    ));
    if forward.is_empty() {
        forward.push(Finding::ok("forward-policy", "no chain drops what is forwarded by its policy"));
    }
    findings.extend(forward);
    findings.extend(forward_rules(&facts.rules));
    findings.extend(masquerade(&facts.rules));
    findings
}

/// Reports rules, network policies among them, that do not see redirected packets.
fn forward_rules(rules: &Rules) -> Option<Finding> {
    named(rules, |chain| chain.forward && chain.in_use).map(|chains| {
        Finding::note(
            "forward-rules",
            format!(
                "rules of chain {chains} see what goes to pods of this node, and not what is sent on to endpoints of other nodes, which is redirected past them",
            ),
            "nothing for network policies, which the endpoint's node applies; a rule about clients from outside: where the endpoint is, with externalTrafficPolicy: Local, or as loadBalancerSourceRanges",
        )
    })
}

/// Names those chains that do not belong to kube-proxy; `None` if there are none.
fn named(rules: &Rules, is_one: fn(&Chain) -> bool) -> Option<String> {
    let chains = rules.chains.iter().filter(|chain| is_one(chain) && !is_kube_proxys(chain));
    let name = |chain: &Chain| format!("{} of table {} {}", chain.name, chain.table.family, chain.table.name);
    let names: Vec<_> = chains.map(name).collect();
    (!names.is_empty()).then(|| names.join(", chain "))
}

/// Whether a chain belongs to kube-proxy and disappears with it: other findings cover that.
fn is_kube_proxys(chain: &Chain) -> bool {
    chain.table.name == "kube-proxy" || chain.name.starts_with("KUBE-")
}

/// Reports masquerade rules: the ports that they take are not known beforehand.
fn masquerade(rules: &Rules) -> Option<Finding> {
    named(rules, |chain| chain.source_nat).map(|chains| {
        Finding::note(
            "masquerade",
            format!(
                "chain {chains}: a masquerade there may give a pod's connection a source port of --snat-ports; if a flow to the same endpoint has that port, answers are taken for its",
            ),
            "nothing if pods reach pods without masquerade; else keep its ports apart: -j MASQUERADE --to-ports with the range of net.ipv4.ip_local_port_range, which is left out of --snat-ports",
        )
    })
}

/// Placeholder for an unknown pod range.
const PODS: &str = "<pods of this node>";

fn iptables(command: &str, chain: &str) -> [String; 2] {
    [format!("{command} -I {chain} -d {PODS} -j ACCEPT"), format!("{command} -I {chain} -s {PODS} -j ACCEPT")]
}

fn forward_drops(rules: &Rules) -> Vec<Finding> {
    let drops = rules.chains.iter().filter(|chain| chain.forward && chain.drops);
    drops
        .map(|chain| {
            let Table { family, name: table } = &chain.table;
            Finding::warning(
                "forward-policy",
                format!(
                    "chain {} of nftables table {family} {table} has policy DROP: packets to pods of this node, and their replies, end there unless a rule accepts them; what is sent on to endpoints of other nodes is redirected and passes no chain of this node",
                    chain.name
                ),
                accept(chain, rules).join("; "),
            )
        })
        .collect()
}

/// Returns the rules that accept pods' packets. A user of iptables sees them in its listing only if
/// iptables wrote them; Docker rewrites FORWARD but leaves DOCKER-USER alone:
/// <https://docs.docker.com/engine/network/packet-filtering-firewalls/>
fn accept(chain: &Chain, rules: &Rules) -> Vec<String> {
    let table = &chain.table;
    let by_iptables = table.name == "filter" && chain.name == "FORWARD" && table.family != Family::Inet;
    if by_iptables {
        let command = if table.family == Family::Ip { "iptables" } else { "ip6tables" };
        let docker = rules.chains.iter().any(|other| other.table == *table && other.name == "DOCKER-USER");
        return iptables(command, if docker { "DOCKER-USER" } else { "FORWARD" }).to_vec();
    }
    let families: &[&str] = match table.family {
        Family::Ip => &["ip"],
        Family::Ip6 => &["ip6"],
        Family::Inet => &["ip", "ip6"],
    };
    let rule = |family: &&str| {
        ["daddr", "saddr"].map(|side| {
            format!(
                "nft insert rule {} {} {} {family} {side} {PODS} accept",
                table.family, table.name, chain.name
            )
        })
    };
    families.iter().flat_map(rule).collect()
}

/// The probe name of findings about kube-proxy.
pub const KUBE_PROXY: &str = "kube-proxy";

const CLEANUP: &str = "stop kube-proxy on this node, then `kube-proxy --cleanup`";

fn kube_proxy(facts: &Facts) -> Vec<Finding> {
    const PROBE: &str = KUBE_PROXY;
    let mut findings = Vec::new();
    if !facts.running.is_empty() {
        let processes: Vec<_> = facts.running.iter().map(ToString::to_string).collect();
        findings.push(Finding::warning(
            PROBE,
            format!(
                "kube-proxy runs here (process {}): what is not taken before, it serves too, in its own way",
                processes.join(", ")
            ),
            "keep its DaemonSet off this node (a nodeSelector or affinity), then `kube-proxy --cleanup`",
        ));
    }
    let effect = "what reaches the stack is still translated or rejected by an old state";
    for table in facts.rules.tables.iter().filter(|table| table.name == "kube-proxy") {
        findings.push(Finding::warning(
            PROBE,
            format!("nftables table {} kube-proxy is left of kube-proxy: {effect}", table.family),
            format!("{CLEANUP}, or `nft delete table {} kube-proxy`", table.family),
        ));
    }
    let ours = ["KUBE-SERVICES", "KUBE-NODEPORTS"];
    let chains = facts.rules.chains.iter().filter(|chain| ours.contains(&chain.name.as_str()));
    let families: BTreeSet<_> = chains.map(|chain| (chain.table.family, chain.name.clone())).collect();
    for family in [Family::Ip, Family::Ip6] {
        let chains: Vec<_> =
            families.iter().filter(|(of, _)| *of == family).map(|(_, name)| name.as_str()).collect();
        if !chains.is_empty() {
            let command = if family == Family::Ip { "iptables" } else { "ip6tables" };
            findings.push(Finding::warning(
                PROBE,
                format!("{command} chains {} are left of kube-proxy: {effect}", chains.join(", ")),
                CLEANUP,
            ));
        }
    }
    if facts.ipvs {
        findings.push(Finding::warning(
            PROBE,
            "device kube-ipvs0 is left of kube-proxy: the Services' addresses on it count as this node's own, and ipvs takes their packets",
            format!("{CLEANUP}, or `ip link delete kube-ipvs0` and `ipvsadm --clear`"),
        ));
    }
    for (command, tables) in &facts.legacy {
        if tables.iter().any(|table| table == "nat") {
            findings.push(Finding::note(
                PROBE,
                format!("{command}-legacy has a table nat, which only it can read; it may hold chains of kube-proxy"),
                format!("look with `{command}-legacy -t nat -S | grep KUBE-`; if there are any: {CLEANUP}"),
            ));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Severity;

    fn chain(family: Family, table: &str, name: &str) -> Chain {
        Chain {
            table: Table { family, name: table.into() },
            name: name.into(),
            forward: false,
            drops: false,
            source_nat: false,
            in_use: false,
        }
    }

    fn drops(family: Family, table: &str, name: &str) -> Chain {
        Chain { forward: true, drops: true, ..chain(family, table, name) }
    }

    fn complaints(facts: &Facts) -> Vec<Finding> {
        let mut findings = judge(facts);
        findings.retain(|finding| finding.severity != Severity::Ok);
        findings
    }

    fn with_chains(chains: &[Chain]) -> Facts {
        Facts { rules: Rules { tables: Vec::new(), chains: chains.to_vec() }, ..Facts::default() }
    }

    #[test]
    fn no_rules_no_complaints() {
        assert_eq!(complaints(&Facts::default()), []);
        let accepting = Chain { drops: false, ..drops(Family::Ip, "filter", "FORWARD") };
        let input = Chain { forward: false, ..drops(Family::Ip, "filter", "INPUT") };
        let kubelet = chain(Family::Ip, "nat", "KUBE-MARK-MASQ");
        assert_eq!(complaints(&with_chains(&[accepting, input, kubelet])), []);
    }

    #[test]
    fn the_rule_to_add_is_of_the_tool_that_made_the_chain() {
        let fix = |chains: &[Chain]| {
            let [finding] = complaints(&with_chains(chains)).try_into().unwrap();
            assert_eq!((finding.severity, finding.probe), (Severity::Warning, "forward-policy"));
            finding.fix.unwrap()
        };
        let forward = drops(Family::Ip, "filter", "FORWARD");
        assert_eq!(
            fix(std::slice::from_ref(&forward)),
            "iptables -I FORWARD -d <pods of this node> -j ACCEPT; iptables -I FORWARD -s <pods of this node> -j ACCEPT"
        );
        assert!(fix(&[forward, chain(Family::Ip, "filter", "DOCKER-USER")]).contains("-I DOCKER-USER -d"));
        assert!(fix(&[drops(Family::Ip6, "filter", "FORWARD")]).starts_with("ip6tables -I FORWARD"));
        let inet = fix(&[drops(Family::Inet, "fire", "fwd")]);
        assert!(inet.contains("nft insert rule inet fire fwd ip daddr <pods of this node> accept"), "{inet}");
        assert!(
            inet.contains("nft insert rule inet fire fwd ip6 saddr <pods of this node> accept"),
            "{inet}"
        );
    }

    #[test]
    fn a_masquerade_may_take_our_ports() {
        let masquerade = Chain { source_nat: true, ..chain(Family::Ip, "nat", "POSTROUTING") };
        let [finding] = complaints(&with_chains(&[masquerade])).try_into().unwrap();
        assert_eq!((finding.severity, finding.probe), (Severity::Note, "masquerade"));
        assert!(finding.fix.unwrap().contains("--to-ports"));
    }

    #[test]
    fn rules_for_what_is_forwarded_are_passed_by() {
        let forward = Chain { forward: true, in_use: true, ..chain(Family::Ip, "filter", "FORWARD") };
        let empty = Chain { in_use: false, ..forward.clone() };
        let input = Chain { forward: false, ..forward.clone() };
        assert_eq!(complaints(&with_chains(&[empty, input])), []);
        let [finding] = complaints(&with_chains(&[forward])).try_into().unwrap();
        assert_eq!((finding.severity, finding.probe), (Severity::Note, "forward-rules"));
        assert!(finding.found.starts_with("rules of chain FORWARD of table ip filter see"), "{finding:?}");
    }

    #[test]
    fn chains_of_kube_proxys_own_are_not_advised_about() {
        let chains = [
            ("kube-proxy", "filter-forward"),
            ("kube-proxy", "nat-postrouting"),
            ("nat", "KUBE-POSTROUTING"),
        ];
        let chains = chains.map(|(table, name)| Chain {
            forward: true,
            in_use: true,
            source_nat: true,
            ..chain(Family::Ip, table, name)
        });
        assert_eq!(complaints(&with_chains(&chains)), []);
    }

    #[test]
    fn every_kind_of_kube_proxy_is_found() {
        let nft = Table { family: Family::Ip6, name: "kube-proxy".into() };
        let facts = Facts {
            rules: Rules {
                tables: vec![nft],
                chains: vec![
                    chain(Family::Ip, "nat", "KUBE-SERVICES"),
                    chain(Family::Ip, "filter", "KUBE-SERVICES"),
                    chain(Family::Ip, "nat", "KUBE-NODEPORTS"),
                ],
            },
            legacy: vec![("iptables", vec!["nat".into()])],
            ipvs: true,
            running: vec![7],
        };
        let findings = complaints(&facts);
        let expected = [
            ("process 7", "DaemonSet"),
            ("table ip6 kube-proxy", "nft delete table ip6 kube-proxy"),
            ("iptables chains KUBE-NODEPORTS, KUBE-SERVICES", "kube-proxy --cleanup"),
            ("kube-ipvs0", "ip link delete kube-ipvs0"),
            ("iptables-legacy has a table nat", "iptables-legacy -t nat -S"),
        ];
        assert_eq!(findings.len(), expected.len(), "{findings:#?}");
        for (finding, (found, fix)) in findings.iter().zip(expected) {
            assert!(
                finding.found.contains(found) && finding.fix.as_ref().unwrap().contains(fix),
                "{finding:?}"
            );
        }
    }
}
