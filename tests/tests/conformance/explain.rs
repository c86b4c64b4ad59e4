//! Questions to `explain` of the built agent, without a device, without an API server.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    path::Path,
};

use traffic_policy_testing::explain::{self, Answer};

/// The node in question.
pub const NODE: &str = "test-node";

/// The source port of all flows.
const SOURCE_PORT: u16 = 40_123;

/// A new flow: the first packet of a connection, or a datagram.
#[derive(Clone, Debug)]
pub struct Flow {
    pub name: String,
    pub src: IpAddr,
    pub dst: SocketAddr,
    pub protocol: String,
    /// The origin, where the source address does not determine it: `pod`, `node` or `external`.
    pub from: Option<&'static str>,
}

impl Flow {
    pub fn new(name: impl Into<String>, src: IpAddr, dst: SocketAddr, protocol: &str) -> Self {
        Self { name: name.into(), src, dst, protocol: protocol.to_owned(), from: None }
    }
}

/// The expected result of a flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// One of these endpoints, each with whether it sees an address of the node; `None` where it
    /// does not matter.
    Endpoints(BTreeMap<SocketAddr, Option<bool>>),
    Reject,
    Drop,
    /// The flow is left alone.
    Unhandled,
}

/// Asks about all flows at once, and describes each whose result differs from the expected one.
///
/// `options` are those of the node: `--local-address`, `--node-port-addresses`, `--service-cidr`.
pub fn differences(manifests: &Path, options: &[String], flows: &[(Flow, Fate)]) -> Vec<String> {
    let answers = ask(manifests, options, flows.iter().map(|(flow, _)| flow));
    assert_eq!(answers.len(), flows.len(), "one line a flow");
    flows
        .iter()
        .zip(&answers)
        .filter_map(|((flow, fate), answer)| {
            let difference = difference(flow, fate, answer).err()?;
            Some(format!("{}: {} -> {} {}: {difference}", flow.name, flow.src, flow.dst, flow.protocol))
        })
        .collect()
}

fn ask<'a>(manifests: &Path, options: &[String], flows: impl Iterator<Item = &'a Flow>) -> Vec<Answer> {
    let flows: Vec<_> = flows
        .map(|flow| {
            let source = SocketAddr::new(flow.src, SOURCE_PORT);
            let asked = explain::Flow::new(&flow.protocol, source, flow.dst);
            explain::Flow { name: flow.name.clone(), from: flow.from, ..asked }
        })
        .collect();
    let options: Vec<_> = options.iter().map(String::as_str).collect();
    explain::offline(manifests, NODE, &flows, &options).unwrap()
}

fn difference(flow: &Flow, fate: &Fate, answer: &Answer) -> Result<(), String> {
    let expect = |true_, what: String| if true_ { Ok(()) } else { Err(what) };
    expect(answer.name == flow.name, format!("the answer is about {:?}", answer.name))?;
    expect(!answer.steps.is_empty(), "no steps".to_owned())?;
    let verdict = match fate {
        Fate::Endpoints(_) => "endpoints",
        Fate::Reject => "reject",
        Fate::Drop => "drop",
        Fate::Unhandled => "unhandled",
    };
    expect(
        answer.verdict == verdict,
        format!("{}, not {verdict} {fate:?}: {:?}", answer.verdict, answer.steps),
    )?;
    let Fate::Endpoints(endpoints) = fate else {
        return expect(answer.endpoint.is_none(), format!("{verdict} names an endpoint: {answer:?}"));
    };
    let candidates: BTreeSet<_> = answer.candidates.iter().collect();
    expect(
        candidates == endpoints.keys().collect() && candidates.len() == answer.candidates.len(),
        format!("candidates {:?}, not {:?}", answer.candidates, endpoints.keys().collect::<Vec<_>>()),
    )?;
    let chosen = answer.endpoint.ok_or("no endpoint")?;
    let masquerade = endpoints.get(&chosen).ok_or_else(|| format!("endpoint {chosen} is no candidate"))?;
    expect(
        masquerade.is_none_or(|masquerade| masquerade == answer.masquerade),
        format!("masquerade {} towards {chosen}: {:?}", answer.masquerade, answer.steps),
    )?;
    let source = answer.source.ok_or("no source")?;
    let kept = source == SocketAddr::new(flow.src, SOURCE_PORT);
    let on_the_wire = matches!(answer.hook.as_str(), "xdp" | "tc");
    // Where a socket's address is translated, the kernel has not bound its source yet.
    expect(
        !on_the_wire || kept != answer.masquerade,
        format!("masquerade {}, source {source}", answer.masquerade),
    )
}
