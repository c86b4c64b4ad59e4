//! Answers of nodes as text and as JSON.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use serde::Serialize;
use traffic_policy_cluster::{command::view, model::ServiceName};

use super::{super::print as judgements, Report};
use crate::{
    Finding, Level,
    probe::{Answered, Heard, expected_text, heard_text},
};

/// The number of nodes with like answers up to which each gets a line; more share one.
const ALIKE: usize = 8;
/// The number of Services up to which all answers are shown; with more, only differences are.
const DETAILS: usize = 5;

pub(super) fn print(report: &Report, out: &mut dyn Write, all_nodes: bool) -> io::Result<()> {
    let probed = &report.probed;
    let (count, differ) = (probed.answered.len(), probed.differences());
    let within = view::span(report.within);
    writeln!(out, "\nasked from here  {count} questions, {within} for each answer; {differ} answers differ")?;
    let services = probed.services();
    let details = services.len() <= DETAILS;
    section(out, "the proxies", probed.about(None), all_nodes, details)?;
    for service in services {
        section(out, &service.to_string(), probed.about(Some(service)), all_nodes, details)?;
    }
    if !report.not_asked.is_empty() {
        let text = format!(
            "UDP and SCTP are not asked: a datagram without an answer tells nothing, and an association begun would stay ({})",
            report.not_asked.join(", ")
        );
        writeln!(out)?;
        judgements::paragraph(out, "", &text)?;
    }
    if !report.findings.is_empty() {
        writeln!(out)?;
    }
    for finding in &report.findings {
        judgements::print_finding(out, finding)?;
    }
    Ok(())
}

/// A line without its node, by which lines are grouped.
type Alike = [String; 4];

fn section<'p>(
    out: &mut dyn Write,
    title: &str,
    answered: impl Iterator<Item = &'p Answered>,
    all_nodes: bool,
    details: bool,
) -> io::Result<()> {
    let mut groups: BTreeMap<Alike, Vec<&Answered>> = BTreeMap::new();
    for one in answered.filter(|one| details || one.difference.is_some()) {
        groups.entry(alike(one)).or_default().push(one);
    }
    if groups.is_empty() {
        return Ok(());
    }
    let mut lines: Vec<[String; 7]> = Vec::new();
    for ([question, expected, heard, difference], group) in groups {
        let mut line = |node: String, address: String, took: f64| {
            let cells = [question.clone(), expected.clone(), heard.clone()];
            let [question, expected, heard] = cells;
            lines.push([
                node,
                address,
                question,
                expected,
                heard,
                format!("{took:.1} ms"),
                difference.clone(),
            ]);
        };
        if group.len() > ALIKE && !all_nodes {
            let slowest = group.iter().map(|one| milliseconds(one)).fold(0.0, f64::max);
            let text = format!("{} and {} like it", group[0].asking.node, group.len() - 1);
            line(text, "–".to_owned(), slowest);
        } else {
            for one in group {
                line(one.asking.node.clone(), address(one), milliseconds(one));
            }
        }
    }
    lines.sort_by_cached_key(|line| (judgements::natural(&line[0]), line[2].clone()));
    writeln!(out, "\n{title}")?;
    view::table(
        out,
        ["NODE", "ADDRESS", "QUESTION", "EXPECTED", "ANSWER", "WITHIN", "DIFFERENCE"],
        &lines,
        Clone::clone,
    )
}

fn alike(one: &Answered) -> Alike {
    [
        judgements::question(one.asking.question),
        expected_text(one.asking.expected),
        heard_text(&one.heard),
        one.difference.map_or_else(String::new, |difference| difference.cause.code().to_owned()),
    ]
}

fn address(one: &Answered) -> String {
    one.asking.to.map_or_else(|| "–".to_owned(), |to| to.ip().to_string())
}

fn milliseconds(one: &Answered) -> f64 {
    one.took.as_secs_f64() * 1e3
}

/// The members of `lb --probe --output json` in addition to the judgements.
#[derive(Serialize)]
pub(super) struct ProbeDocument<'r> {
    answer_within_seconds: f64,
    asked: usize,
    differ: usize,
    errors: usize,
    answers: Vec<AnswerDocument<'r>>,
    /// Ports of UDP and SCTP, which are not probed.
    not_asked: &'r [String],
    /// Findings about the proxies; those about Services are with the Services.
    findings: &'r [Finding],
}

#[derive(Serialize)]
struct AnswerDocument<'r> {
    node: &'r str,
    /// The Service; `null`: the probe is about the proxy.
    service: Option<String>,
    address: Option<String>,
    question: String,
    expected: String,
    /// The kind of answer: `http`, `connected`, `refused`, `silence`, `hangs`, `unreachable`,
    /// `garbled`, `no-address`, `not-asked`.
    kind: &'static str,
    answer: String,
    status: Option<u16>,
    milliseconds: f64,
    /// The cause of a difference; `null`: the answer is as expected.
    difference: Option<&'static str>,
    level: Option<Level>,
}

pub(super) fn document(report: &Report) -> ProbeDocument<'_> {
    ProbeDocument {
        answer_within_seconds: report.within.as_secs_f64(),
        asked: report.probed.answered.len(),
        differ: report.probed.differences(),
        errors: report.errors(),
        answers: report.probed.answered.iter().map(AnswerDocument::new).collect(),
        not_asked: &report.not_asked,
        findings: &report.findings,
    }
}

impl<'r> AnswerDocument<'r> {
    fn new(one: &'r Answered) -> Self {
        Self {
            node: &one.asking.node,
            service: one.asking.service.as_ref().map(ServiceName::to_string),
            address: one.asking.to.map(|to| to.to_string()),
            question: judgements::question(one.asking.question),
            expected: expected_text(one.asking.expected),
            kind: kind(&one.heard),
            answer: heard_text(&one.heard),
            status: match &one.heard {
                Heard::Http(http) => Some(http.status),
                _ => None,
            },
            milliseconds: milliseconds(one),
            difference: one.difference.map(|difference| difference.cause.code()),
            level: one.difference.map(|difference| difference.level),
        }
    }
}

const fn kind(heard: &Heard) -> &'static str {
    match heard {
        Heard::Http(_) => "http",
        Heard::Connected => "connected",
        Heard::Refused => "refused",
        Heard::Silence => "silence",
        Heard::Hangs => "hangs",
        Heard::Unreachable => "unreachable",
        Heard::Garbled(_) => "garbled",
        Heard::NoAddress => "no-address",
        Heard::NotAsked(_) => "not-asked",
    }
}
