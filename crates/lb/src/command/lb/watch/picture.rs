//! The view of `lb watch`, as lines.

use std::collections::{BTreeMap, VecDeque};

use jiff::Timestamp;
use traffic_policy_cluster::{
    command::view,
    model::{Policy, ServiceName},
};

use super::super::print;
use crate::{Judge, Judgement, Membership, probe::expected_text};

/// The width of a name, in columns.
const NAME: usize = 30;
/// The minimum number of rows of the log.
const LOG: usize = 6;

/// The content of the screen.
#[derive(Default)]
pub(super) struct Picture {
    /// Whether all objects have been seen once.
    begun: bool,
    nodes: usize,
    services: Vec<ServiceLine>,
    /// The rows of the Service, if there is only one.
    rows: Vec<NodeLine>,
}

struct ServiceLine {
    name: ServiceName,
    policy: Policy,
    balancer: &'static str,
    healthy: usize,
    nodes: usize,
    pods: usize,
    lost: f64,
    skew: Option<f64>,
}

struct NodeLine {
    node: String,
    service: ServiceName,
    pods: usize,
    told: String,
    healthy: bool,
    traffic: &'static str,
}

impl Picture {
    pub(super) fn new<'a>(judge: &Judge<'a>, judgements: &[Judgement<'a>]) -> Self {
        let services = judgements.iter().filter_map(|judgement| {
            let worst = judgement.ports.iter().min_by_key(|port| port.healthy())?;
            Some(ServiceLine {
                name: judgement.service.name.clone(),
                policy: judgement.policy,
                balancer: judgement.balancer.name,
                healthy: worst.healthy(),
                nodes: worst.nodes(),
                pods: worst.ready(),
                lost: judgement.ports.iter().map(|port| port.lost).fold(0.0, f64::max),
                skew: worst.skew(),
            })
        });
        let rows = match judgements {
            [judgement] => node_lines(judge, judgement),
            _ => Vec::new(),
        };
        Self { begun: true, nodes: judge.node_count(), services: services.collect(), rows }
    }

    /// Renders the lines. `answers` returns what is known of a node's answers; nothing if nodes are
    /// not probed.
    pub(super) fn lines(
        &self,
        (columns, height): (usize, usize),
        troubles: &BTreeMap<String, String>,
        log: &VecDeque<String>,
        answers: impl Fn(&ServiceName, &str) -> Option<String>,
    ) -> Vec<String> {
        let time = Timestamp::now().strftime("%H:%M:%SZ");
        let mut lines = vec![format!(
            "lb watch  {time}  nodes: {}  Services: {}  (Ctrl-C ends it)",
            self.nodes,
            self.services.len()
        )];
        for (subject, trouble) in troubles.iter().take(2) {
            lines.push(format!("! {subject}: {trouble}"));
        }
        lines.push(String::new());
        // The table gets what the log leaves; its title, and the empty line and title of the log,
        // are counted.
        let room = height.saturating_sub(lines.len() + LOG + 3).max(1);
        lines.extend(match self.services.as_slice() {
            [service] => self.of_one(service, room, answers),
            _ => self.of_many(room),
        });
        lines.push(String::new());
        lines.push("changes".to_owned());
        let left = height.saturating_sub(lines.len());
        let mut last: VecDeque<String> = VecDeque::new();
        for line in log.iter().rev() {
            let parts = wrapped(line, columns);
            if last.len() + parts.len() > left {
                // At least the beginning of the newest line is shown.
                if last.is_empty() {
                    last.extend(parts.into_iter().take(left));
                }
                break;
            }
            parts.into_iter().rev().for_each(|part| last.push_front(part));
        }
        lines.extend(last);
        lines
    }

    fn of_one(
        &self,
        service: &ServiceLine,
        room: usize,
        answers: impl Fn(&ServiceName, &str) -> Option<String>,
    ) -> Vec<String> {
        let mut lines = vec![format!(
            "{}  {}  {}  {} of {} healthy  lost {}",
            shorten(&service.name.to_string()),
            view::policy(service.policy),
            service.balancer,
            service.healthy,
            service.nodes,
            print::percent(service.lost)
        )];
        let room = room.saturating_sub(1).max(1);
        let mut rows: Vec<[String; 5]> = Vec::new();
        // Unhealthy nodes come first if there is not room for all.
        let mut order: Vec<&NodeLine> = self.rows.iter().collect();
        if order.len() > room {
            order.sort_by_key(|row| row.healthy);
        }
        let more = order.len().saturating_sub(room);
        for row in order.into_iter().take(room) {
            let answer = answers(&row.service, &row.node).unwrap_or_default();
            rows.push([
                shorten(&row.node),
                row.pods.to_string(),
                row.told.clone(),
                row.traffic.to_owned(),
                answer,
            ]);
        }
        lines.extend(table(["NODE", "PODS", "TOLD", "TRAFFIC", "ANSWERS"], &rows));
        if more > 0 {
            lines.push(format!("and {more} more nodes"));
        }
        lines
    }

    fn of_many(&self, room: usize) -> Vec<String> {
        if !self.begun {
            return vec!["waiting for the first objects".to_owned()];
        }
        if self.services.is_empty() {
            return vec!["no Service is reached from outside".to_owned()];
        }
        let mut order: Vec<&ServiceLine> = self.services.iter().collect();
        if order.len() > room {
            order.sort_by(|a, b| b.lost.total_cmp(&a.lost).then(a.healthy.cmp(&b.healthy)));
        }
        let rows: Vec<[String; 6]> = order
            .iter()
            .take(room)
            .map(|service| {
                [
                    shorten(&service.name.to_string()),
                    view::policy(service.policy).to_owned(),
                    format!("{} of {}", service.healthy, service.nodes),
                    service.pods.to_string(),
                    print::percent(service.lost),
                    service.skew.map_or_else(|| "–".to_owned(), |skew| format!("{skew:.2}")),
                ]
            })
            .collect();
        let mut lines = table(["SERVICE", "POLICY", "HEALTHY", "PODS", "LOST", "SKEW"], &rows);
        if order.len() > room {
            lines.push(format!("and {} more Services", order.len() - room));
        }
        lines
    }
}

fn node_lines<'a>(judge: &Judge<'a>, judgement: &Judgement<'a>) -> Vec<NodeLine> {
    let mut lines = Vec::new();
    for port in judgement.ports.iter().take(1) {
        for row in &port.rows {
            let healthy = row.membership == Membership::Member && row.answer.is_healthy();
            for name in judge.names(port, row, row.count) {
                lines.push(NodeLine {
                    node: name.to_owned(),
                    service: judgement.service.name.clone(),
                    pods: row.pods,
                    told: expected_text(row.answer),
                    healthy,
                    traffic: if row.takes { "yes" } else { "no" },
                });
            }
        }
    }
    lines.sort_by_cached_key(|line| print::natural(&line.node));
    lines
}

fn table<const N: usize>(header: [&str; N], rows: &[[String; N]]) -> Vec<String> {
    let mut text = Vec::new();
    // Writing to memory does not fail.
    let _ = view::table(&mut text, header, rows, Clone::clone);
    String::from_utf8_lossy(&text).lines().map(str::to_owned).collect()
}

/// Shortens a name to its head and tail: the common part of node names is in the middle.
fn shorten(name: &str) -> String {
    let count = name.chars().count();
    if count <= NAME {
        return name.to_owned();
    }
    let (head, tail) = (NAME / 2, NAME - NAME / 2 - 1);
    name.chars().take(head).chain(['…']).chain(name.chars().skip(count - tail)).collect()
}

/// Wraps a line of the log, indenting the continuation lines.
pub(super) fn wrapped(line: &str, columns: usize) -> Vec<String> {
    const INDENT: usize = 4;
    let width = columns.saturating_sub(INDENT).max(20);
    let mut lines = Vec::new();
    for part in view::wrap(line, width) {
        // A word may be longer than a line.
        let mut rest: Vec<char> = part.chars().collect();
        while rest.len() > width {
            let tail = rest.split_off(width);
            lines.push(rest.into_iter().collect::<String>());
            rest = tail;
        }
        lines.push(rest.into_iter().collect());
    }
    lines
        .iter()
        .enumerate()
        .map(|(at, line)| if at == 0 { line.clone() } else { format!("{:INDENT$}{line}", "") })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_line_is_longer_than_its_columns() {
        let line = format!(
            "2026-11-22T18:00:00.000Z shop/web: {}: turns unhealthy {}",
            "n".repeat(70),
            "x ".repeat(50)
        );
        for columns in [40, 80] {
            let lines = wrapped(&line, columns);
            assert!(lines.iter().all(|line| line.chars().count() <= columns), "{lines:#?}");
            assert_eq!(lines.concat().replace(' ', ""), line.replace(' ', ""));
        }
        let name = shorten(&format!("gke-{}-abcd", "pool".repeat(10)));
        assert!(
            name.chars().count() == NAME && name.starts_with("gke-pool") && name.ends_with("-abcd"),
            "{name}"
        );
    }

    #[test]
    fn the_unhealthy_ones_are_shown_where_not_all_have_room() {
        let service = ServiceName { namespace: "shop".to_owned(), name: "web".to_owned() };
        let row = |number: usize| NodeLine {
            node: format!("node-{number}"),
            service: service.clone(),
            pods: 1,
            told: "200, 1 endpoint".to_owned(),
            healthy: number != 40,
            traffic: "yes",
        };
        let line = ServiceLine {
            name: service.clone(),
            policy: Policy::Local,
            balancer: "gke",
            healthy: 39,
            nodes: 40,
            pods: 40,
            lost: 0.0,
            skew: None,
        };
        let picture =
            Picture { begun: true, nodes: 40, services: vec![line], rows: (1..=40).map(row).collect() };
        let log: VecDeque<String> = (0..100).map(|number| format!("change {number}")).collect();
        let lines = picture.lines((80, 24), &BTreeMap::new(), &log, |_, _| Some("as told".to_owned()));
        assert!(lines.len() <= 24, "{lines:#?}");
        assert!(lines.iter().any(|line| line.starts_with("node-40 ")), "{lines:#?}");
        assert!(lines.iter().any(|line| line.starts_with("and 2")), "{lines:#?}");
        assert_eq!(lines.last().unwrap(), "change 99");
    }
}
