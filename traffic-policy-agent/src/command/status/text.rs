//! The state of the node as human-readable text.

use std::{
    collections::BTreeSet,
    io::{self, Write},
    time::Duration,
};

use super::{super::view, Agent, Document};
use crate::health::DirectForwarding;

impl Document {
    pub(super) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        self.agent.write(out)?;
        for warning in &self.warnings {
            writeln!(out, "warning     {warning}")?;
        }
        let [flows4, flows6] = self.flows.entries.map(|entries| entries.div_ceil(2));
        let unassured: u64 = self.flows.unassured.iter().sum();
        writeln!(out, "flows       {flows4} IPv4, {flows6} IPv6 ({unassured} unassured)")?;
        if let Some(seconds) = self.flows.full_seconds_ago {
            writeln!(
                out,
                "full        a flow found no room in its table {} ago: if that is no flood, raise --flow-entries (or --flow-entries-v6) after `cleanup`",
                view::span(Duration::from_secs_f64(seconds))
            )?;
        }
        writeln!(out, "snat ports  {} towards each endpoint of another node", self.snat_ports)?;
        for draining in &self.draining {
            let rest = Duration::from_secs_f64(draining.seconds);
            writeln!(
                out,
                "draining    {} at {}: new connections are forwarded for {} more",
                draining.service,
                draining.address,
                view::span(rest)
            )?;
        }
        if let Some(pods) = &self.local_delivery {
            pods.write(out)?;
        }
        if let Some(pods) = &self.pod_services {
            pods.write(out)?;
        }
        writeln!(out)?;
        view::table(out, ["ATTACHED TO", "HOOK", "PROGRAM"], &self.attached, |attached| {
            let program = attached.program.map_or_else(|| "–".to_owned(), |program| program.to_string());
            [attached.target.clone(), attached.hook.clone(), program]
        })?;
        writeln!(out)?;
        let hashed: Vec<_> = self.maps.iter().filter(|map| map.used.is_some()).collect();
        view::table(out, ["MAP", "USED", "SIZE", "USE%", "KB"], &hashed, |map| {
            let used = map.used.unwrap_or(0);
            let percent = used as f64 * 100.0 / f64::from(map.size.max(1));
            let kilobytes = map.bytes.div_ceil(1024);
            [
                map.name.clone(),
                used.to_string(),
                map.size.to_string(),
                format!("{percent:.0}"),
                kilobytes.to_string(),
            ]
        })?;
        writeln!(out, "all {} maps: {} KB\n", self.maps.len(), self.map_bytes.div_ceil(1024))?;
        view::table(out, ["HOOK", "OUTCOME", "PACKETS"], &self.counters, |counter| {
            [counter.hook.to_owned(), counter.outcome.to_owned(), counter.packets.to_string()]
        })
    }
}

impl Agent {
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let ago = |seconds: Option<f64>| {
            seconds.map_or_else(
                || "never".to_owned(),
                |s| format!("{} ago", view::span(Duration::from_secs_f64(s))),
            )
        };
        match self.pid {
            Some(pid) if self.loading => writeln!(
                out,
                "agent       process {pid} is loading its programs; {}",
                if self.synced_seconds_ago.is_some() {
                    "until then the packet path goes on with what was last written"
                } else {
                    "nothing is attached until then"
                }
            )?,
            Some(pid) => writeln!(
                out,
                "agent       running, process {pid}, started {}",
                ago(self.started_seconds_ago)
            )?,
            None => writeln!(
                out,
                "agent       not running, last seen {}; the packet path goes on with what it last wrote",
                ago(self.seen_seconds_ago)
            )?,
        }
        let synced = ago(self.synced_seconds_ago);
        let Some(report) = &self.report else { return writeln!(out, "state       last in sync {synced}") };
        if report.in_sync {
            writeln!(out, "state       in sync with the cluster, last change written {synced}")?;
        } else {
            writeln!(out, "state       NOT in sync, last sync {synced}, because:")?;
            for block in &report.waiting_for {
                writeln!(out, "            - {block}")?;
            }
            for left_out in &report.left_out {
                writeln!(out, "            - no room in the maps for {left_out}")?;
            }
        }
        if let Some(leaving) = &report.leaving {
            writeln!(
                out,
                "node        about to go, so load balancers are told not to send here; the packet path goes on: {leaving}"
            )?;
        }
        if !report.node_eligible {
            writeln!(
                out,
                "node        load balancers are told not to send here: the Node object is not known, is being deleted, or is marked by the autoscaler"
            )?;
        }
        if report.cut_off {
            writeln!(
                out,
                "node        CUT OFF: no other node and no gateway answers; load balancers are told not to send here"
            )?;
        }
        if let Some(direct) = &report.direct {
            writeln!(out, "direct      {}", direct_forwarding(direct))?;
        }
        for (node, left_out) in &report.nodes_left_out {
            let since = view::span(Duration::from_secs_f64(left_out.seconds));
            // Endpoints without a `nodeName` are left out by their next hop, whose name is "next
            // hop" and the address.
            let what = if node.contains(' ') { "" } else { "node " };
            writeln!(
                out,
                "left out    the endpoints of {what}{node}, which has not answered for {since} (asked: {})",
                left_out.asked
            )?;
        }
        for (kind, stale) in &report.stale {
            let age = view::span(Duration::from_secs_f64(stale.seconds));
            writeln!(out, "stale       {kind}: what is known of them is older than {age}: {}", stale.why)?;
        }
        for (subject, trouble) in &report.errors {
            writeln!(out, "error       {subject}: {trouble}")?;
        }
        Ok(())
    }
}

/// Returns what part the node takes in direct forwarding.
fn direct_forwarding(direct: &DirectForwarding) -> String {
    let own = match (&direct.why_not, &direct.trouble) {
        _ if direct.opens => "this node opens packets of the others".to_owned(),
        (Some(why), _) => format!("this node opens no packets of the others: {why}"),
        (None, Some(trouble)) => {
            format!(
                "the others do not know that this node opens packets, for its Lease cannot be written: {trouble}"
            )
        }
        (None, None) if direct.told => "the others are being told that this node opens packets".to_owned(),
        // Leases come from files (`--manifests`), or the agent has only just started.
        (None, None) => "nothing is told to the others yet".to_owned(),
    };
    // Usually all nodes get the same dispatch: it is named once, and for each node only if they
    // differ.
    let dispatches: BTreeSet<_> = direct.dispatch.values().collect();
    let each = |(node, dispatch): (&String, &String)| format!("{node} ({dispatch})");
    let (opened, within) = match dispatches.iter().collect::<Vec<_>>().as_slice() {
        [only] => (few(direct.nodes.iter().cloned()), format!(" within {only}")),
        [] => (few(direct.nodes.iter().cloned()), String::new()),
        _ => (few(direct.dispatch.iter().map(each)), String::new()),
    };
    let others = match opened {
        _ if direct.waits => "its own are not sent directly until the others know it".to_owned(),
        None => "no other node opens packets".to_owned(),
        Some(opened) => format!("its own are opened{within} by {opened}"),
    };
    let snat = match few(direct.by_snat.iter().cloned()).filter(|_| !direct.waits) {
        Some(nodes) => format!("; SNAT towards {nodes}"),
        None => String::new(),
    };
    let each = |(node, what): (&String, &String)| format!("{node} ({what})");
    let lacking = match few(direct.lacking.iter().map(each)) {
        Some(nodes) => format!("; not all gets to {nodes}"),
        None => String::new(),
    };
    format!("{own}; {others}{snat}{lacking}")
}

/// Names a few of many, and how many more there are; `None` if there are none.
fn few(names: impl ExactSizeIterator<Item = String>) -> Option<String> {
    const NAMED: usize = 5;
    let all = names.len();
    let some: Vec<_> = names.take(NAMED).collect();
    match all.saturating_sub(some.len()) {
        _ if some.is_empty() => None,
        0 => Some(some.join(", ")),
        more => Some(format!("{} and {more} more", some.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use traffic_policy_ebpf::abi::ABI_VERSION;

    use super::{
        super::{Attached, Counter, Draining, Flows, Map},
        *,
    };
    use crate::health;

    /// One dispatch for all is named once, and nodes that get SNAT are, too.
    #[test]
    fn what_packets_travel_in_towards_each_node() {
        let with = |used: &[(&str, &str)], by_snat: &[&str]| {
            let direct = DirectForwarding {
                opens: true,
                nodes: used.iter().map(|(node, _)| (*node).to_owned()).collect(),
                dispatch: used.iter().map(|(node, way)| ((*node).to_owned(), (*way).to_owned())).collect(),
                by_snat: by_snat.iter().map(|node| (*node).to_owned()).collect(),
                ..DirectForwarding::default()
            };
            let text = direct_forwarding(&direct);
            text.split_once("; ").map(|(_, others)| others.to_owned()).unwrap()
        };
        assert_eq!(with(&[("b", "udp"), ("c", "udp")], &[]), "its own are opened within udp by b, c");
        assert_eq!(
            with(&[("b", "udp"), ("c", "ipip")], &["d"]),
            "its own are opened by b (udp), c (ipip); SNAT towards d"
        );
        assert_eq!(with(&[], &["d"]), "no other node opens packets; SNAT towards d");
        let mut lacking = DirectForwarding { opens: true, ..DirectForwarding::default() };
        lacking.by_snat.insert("d".to_owned());
        lacking.lacking.insert("d".to_owned(), "IPv4: not at all".to_owned());
        assert!(
            direct_forwarding(&lacking).ends_with("; SNAT towards d; not all gets to d (IPv4: not at all)")
        );
        let many = ["1", "2", "3", "4", "5", "6", "7"];
        let all = many.map(|node| (node, "ipip"));
        assert_eq!(with(&all, &[]), "its own are opened within ipip by 1, 2, 3, 4, 5 and 2 more");
    }

    fn document() -> Document {
        Document {
            agent: Agent {
                running: true,
                loading: false,
                pid: Some(42),
                started_seconds_ago: Some(100.0),
                seen_seconds_ago: Some(1.0),
                synced_seconds_ago: None,
                report: Some(health::Report {
                    waiting_for: vec!["waiting for the first look at Services".to_owned()],
                    ..health::Report::default()
                }),
            },
            layout: ABI_VERSION,
            attached: vec![Attached {
                target: "eth0".to_owned(),
                hook: "tc-ingress".to_owned(),
                program: Some(7),
                present: true,
            }],
            maps: vec![
                Map { name: "tp_flows4".to_owned(), used: Some(64), size: 128, bytes: 16_384 },
                Map { name: "tp_config".to_owned(), used: None, size: 1, bytes: 4096 },
            ],
            map_bytes: 20_480,
            snat_ports: 31_000,
            flows: Flows {
                entries: [64, 0],
                size: [128, 128],
                unassured: [3, 0],
                full_seconds_ago: Some(3.2),
            },
            local_delivery: None,
            pod_services: None,
            draining: vec![Draining {
                service: "shop/web:http".to_owned(),
                address: "172.18.0.11:30080/tcp".to_owned(),
                seconds: 28.4,
            }],
            counters: vec![Counter { hook: "tc-ingress", outcome: "forwarded", packets: 5 }],
            warnings: vec!["eth1 is gone: what was attached to it sees no packet".to_owned()],
        }
    }

    fn text(document: &Document) -> String {
        let mut out = Vec::new();
        document.write(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn says_what_is_in_the_way() {
        let text = text(&document());
        for line in [
            "agent       running, process 42, started 1m40s ago",
            "state       NOT in sync, last sync never, because:",
            "            - waiting for the first look at Services",
            "node        load balancers are told not to send here",
            "warning     eth1 is gone",
            "flows       32 IPv4, 0 IPv6 (3 unassured)",
            "full        a flow found no room in its table 3.2s ago: if that is no flood, raise --flow-entries",
            "draining    shop/web:http at 172.18.0.11:30080/tcp: new connections are forwarded for 28s more",
            "tp_flows4    64   128    50  16",
            "all 2 maps: 20 KB",
            "tc-ingress  forwarded        5",
        ] {
            assert!(text.contains(line), "no {line:?} in\n{text}");
        }
        assert!(!text.contains("\ntp_config"), "arrays are always full\n{text}");
    }

    #[test]
    fn while_it_loads() {
        let mut document = document();
        // The maps are as they are before anything was written to them.
        document.agent = Agent {
            loading: true,
            started_seconds_ago: None,
            seen_seconds_ago: None,
            report: None,
            ..document.agent
        };
        let first = text(&document);
        let line = "agent       process 42 is loading its programs; nothing is attached until then\n";
        assert!(first.starts_with(line), "{first}");
        assert!(!first.contains("running") && !first.contains("started never"), "{first}");
        document.agent.synced_seconds_ago = Some(7.0);
        let successor = text(&document);
        let line =
            "process 42 is loading its programs; until then the packet path goes on with what was last";
        assert!(successor.contains(line), "{successor}");
        assert!(successor.contains("state       last in sync 7s ago\n"), "{successor}");
    }

    #[test]
    fn of_a_dead_agent() {
        let mut document = document();
        document.agent = Agent {
            running: false,
            pid: None,
            synced_seconds_ago: Some(7_300.0),
            report: None,
            ..document.agent
        };
        let text = text(&document);
        assert!(
            text.starts_with("agent       not running, last seen 1s ago; the packet path goes on"),
            "{text}"
        );
        assert!(text.contains("state       last in sync 2h01m ago\n"), "{text}");
    }
}
