//! Differences as findings: those with the same cause and probe share one.

use std::collections::BTreeMap;

use super::{Answered, Cause, Heard, Spoken};
use crate::{Answer, Finding, Level, Question};

/// The number of node names in a sentence.
const NAMES: usize = 3;

pub(super) fn findings<'p>(answered: impl Iterator<Item = &'p Answered>) -> Vec<Finding> {
    let mut left_out: BTreeMap<&'p str, Vec<&'p str>> = BTreeMap::new();
    let mut groups: BTreeMap<(Level, Cause, Port), Vec<&'p Answered>> = BTreeMap::new();
    for one in answered {
        for node in one.heard.left_out() {
            left_out.entry(node).or_default().push(&one.asking.node);
        }
        if let Some(difference) = one.difference {
            groups
                .entry((difference.level, difference.cause, Port::of(one.asking.question)))
                .or_default()
                .push(one);
        }
    }
    let mut findings: Vec<_> =
        groups.into_iter().map(|((level, cause, _), group)| finding(level, cause, &group)).collect();
    findings.extend(left_out.into_iter().map(|(node, by)| is_left_out(node, &by)));
    findings.sort_by_key(|finding| finding.level);
    findings
}

/// Returns the finding about a node that does not answer the agents of others.
fn is_left_out(node: &str, by: &[&str]) -> Finding {
    let who = match by {
        [name] => format!("node {name} leaves"),
        names if names.len() > NAMES => {
            format!("{} nodes ({}, …) leave", names.len(), names[..NAMES].join(", "))
        }
        names => format!("{} nodes ({}) leave", names.len(), names.join(", ")),
    };
    let what =
        format!("{who} out the endpoints of node {node} for new connections: it does not answer there");
    let fix = "see whether that node is dead, or what is between it and the others; it gets connections again once it answers twice";
    Finding::new(Level::Warning, "left-out", what, fix)
}

/// A probe as a key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Port {
    Proxy,
    Health(u16),
    Traffic(u16),
    None,
}

impl Port {
    fn of(question: Question) -> Self {
        match question {
            Question::ProxyHealth => Self::Proxy,
            Question::ServiceHealth(port) => Self::Health(port),
            Question::TrafficPort(port) => Self::Traffic(port),
            Question::Nothing => Self::None,
        }
    }
}

fn finding(level: Level, cause: Cause, group: &[&Answered]) -> Finding {
    let names: Vec<_> = group.iter().take(NAMES).map(|one| one.asking.node.as_str()).collect();
    let (who, such_as) = match (group.len(), names.as_slice()) {
        (1, [name]) => (format!("node {name}"), String::new()),
        (count, [first, ..]) if count > NAMES => {
            (format!("{count} nodes ({}, …)", names.join(", ")), format!("{first}: "))
        }
        (count, [first, ..]) => (format!("{count} nodes ({})", names.join(", ")), format!("{first}: ")),
        _ => (String::new(), String::new()),
    };
    let Some(first) = group.first() else {
        return Finding::new(level, cause.code(), String::new(), cause.fix());
    };
    let about = first.asking.service.as_ref().map_or_else(String::new, |service| format!(" of {service}"));
    let heard = match &first.heard {
        Heard::NotAsked(why) => format!("was not asked ({why})"),
        Heard::NoAddress => "has no address to be asked at".to_owned(),
        heard => {
            format!("{}, and the objects say {}", heard_text(heard), expected_text(first.asking.expected))
        }
    };
    let what = format!(
        "{}{about} at {who}: {such_as}{heard}; {}",
        question_text(first.asking.question),
        explanation(cause, first)
    );
    Finding::new(level, cause.code(), what, cause.fix())
}

/// Describes a probe.
pub(crate) fn question_text(question: Question) -> String {
    match question {
        Question::ProxyHealth => "GET :10256/healthz".to_owned(),
        Question::ServiceHealth(port) => format!("GET :{port}"),
        Question::TrafficPort(port) => format!("connect :{port}"),
        Question::Nothing => "nothing".to_owned(),
    }
}

/// Describes the answer that follows from the objects, in a word or two.
#[must_use]
pub fn expected_text(answer: Answer) -> String {
    match answer {
        Answer::Ok(Some(endpoints)) => format!("200, {}", counted(endpoints)),
        Answer::Ok(None) => "200".to_owned(),
        Answer::Unavailable => "503".to_owned(),
        Answer::Open => "connects".to_owned(),
        Answer::Refused => "refused".to_owned(),
        Answer::Silence => "silence".to_owned(),
        Answer::Announced => "announces".to_owned(),
        Answer::NotAnnounced => "does not announce".to_owned(),
    }
}

fn counted(endpoints: usize) -> String {
    format!("{endpoints} endpoint{}", if endpoints == 1 { "" } else { "s" })
}

/// Describes an answer, in a word or two.
#[must_use]
pub fn heard_text(heard: &Heard) -> String {
    match heard {
        Heard::Http(http) => match &http.spoken {
            Spoken::Service { healthy: Some(false), .. } => {
                format!("{}, serviceProxyHealthy false", http.status)
            }
            Spoken::Service { leaving: true, .. } => format!("{}, nodeLeaving", http.status),
            Spoken::Service { endpoints: 0, .. } if http.status == 503 => "503".to_owned(),
            Spoken::Service { endpoints, .. } => format!("{}, {}", http.status, counted(*endpoints)),
            Spoken::Proxy { cut_off: true, .. } => format!("{}, cutOff true", http.status),
            Spoken::Proxy { leaving: true, .. } => format!("{}, leaving", http.status),
            Spoken::Proxy { eligible: Some(false), .. } => format!("{}, nodeEligible false", http.status),
            Spoken::Proxy { healthy: Some(false), .. } => format!("{}, healthy false", http.status),
            Spoken::Proxy { .. } => http.status.to_string(),
            Spoken::Other => format!("{}, another body", http.status),
        },
        Heard::Connected => "connects".to_owned(),
        Heard::Refused => "refused".to_owned(),
        Heard::Silence => "silence".to_owned(),
        Heard::Hangs => "a connection without an answer".to_owned(),
        Heard::Unreachable => "unreachable".to_owned(),
        Heard::Garbled(why) => format!("no HTTP ({why})"),
        Heard::NoAddress => "no address".to_owned(),
        Heard::NotAsked(_) => "not asked".to_owned(),
    }
}

fn explanation(cause: Cause, one: &Answered) -> String {
    let traffic = matches!(one.asking.question, Question::TrafficPort(_));
    match cause {
        Cause::DeadAgent => "/healthz is refused there: no proxy runs on it".to_owned(),
        Cause::NothingListens if traffic => {
            "no proxy serves the port there, or the pod that it chose does not listen".to_owned()
        }
        Cause::NothingListens if one.asking.question == Question::ProxyHealth => {
            "another health port of it answers, so a proxy runs there with its /healthz elsewhere".to_owned()
        }
        Cause::NothingListens => {
            "a proxy runs there and has not opened the port: it does not know the Service like this, or the port was taken"
                .to_owned()
        }
        Cause::Firewall if traffic => {
            "a firewall on the way drops it, the node is down, or its proxy knows no endpoint there".to_owned()
        }
        Cause::Firewall => "a firewall on the way drops it, or the node is down".to_owned(),
        Cause::WrongAddress => "no route from here leads to this address".to_owned(),
        Cause::NoAddress => "its Node object names none of the wanted type".to_owned(),
        Cause::Hangs => "something takes connections and does not answer in time".to_owned(),
        Cause::CutOff => {
            "the agent there hears no other node with endpoints, and takes its own for cut off".to_owned()
        }
        Cause::Leaving => {
            "the agent there knows that its node is about to go, and these objects do not say so".to_owned()
        }
        Cause::UnhealthyProxy => "the proxy says itself that it does not keep up with changes".to_owned(),
        Cause::StaleProxy if traffic => {
            "the proxy forwards to endpoints that these objects do not have, or is in the drain after a change of policy".to_owned()
        }
        Cause::StaleProxy => "the proxy there has other objects: it is stale, or these are".to_owned(),
        Cause::OtherService => match &one.heard {
            Heard::Http(super::Http { spoken: Spoken::Service { service, .. }, .. }) => {
                format!("it answers for the Service {service}: the port has moved, or it is a node of another cluster")
            }
            _ => "it answers for another Service".to_owned(),
        },
        Cause::OtherProxy => {
            "it does not answer as kube-proxy and this agent do: another proxy, an older kube-proxy, or another program has the port".to_owned()
        }
        Cause::KubeletOnly => "only the kubelet is silent, the node is not".to_owned(),
        Cause::NotAsked => "that tells nothing about the node".to_owned(),
    }
}
