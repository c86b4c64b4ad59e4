//! `flows`: the flow table.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use anyhow::Result;
use clap::{Args, ValueEnum, builder::PossibleValue};
use ipnet::IpNet;
use serde::Serialize;
use traffic_policy_cluster::model::{Dispatch, ServicePortKey};
use traffic_policy_dataplane::inspect::{Flow, FlowKind, FlowState, Nodes, device_name, service_names};

use super::view::{self, View};

/// Show the flow table: which client talks to which endpoint, through which frontend, in which
/// state.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Only flows of this Service: NAME, or NAMESPACE/NAME.
    #[arg(long, value_name = "NAME")]
    service: Option<String>,
    /// Only flows of clients with this address, or of this range.
    #[arg(long, value_name = "IP|CIDR", value_parser = net)]
    client: Option<IpNet>,
    /// Only flows to this endpoint, on any port or on one.
    #[arg(long, value_name = "IP[:PORT]", value_parser = endpoint)]
    endpoint: Option<(IpAddr, Option<u16>)>,
    /// Only flows in this state. `removed`: flows whose endpoint takes no new connections.
    #[arg(long, value_name = "STATE")]
    state: Option<State>,
    /// Maximum number of flows.
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    #[command(flatten)]
    view: View,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Is(FlowState),
    Removed,
}

impl ValueEnum for State {
    fn value_variants<'a>() -> &'a [Self] {
        use FlowState::{Answered, Assured, Closing, Finished, New, Reset};
        &[
            Self::Is(New),
            Self::Is(Answered),
            Self::Is(Assured),
            Self::Is(Closing),
            Self::Is(Finished),
            Self::Is(Reset),
            Self::Removed,
        ]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(match self {
            Self::Is(state) => PossibleValue::new(state.name()),
            // The name before the first release.
            Self::Removed => PossibleValue::new("removed").alias("gone"),
        })
    }
}

/// An address or a range.
pub(super) fn net(text: &str) -> Result<IpNet, String> {
    text.parse()
        .or_else(|_| text.parse::<IpAddr>().map(IpNet::from))
        .map_err(|_| format!("`{text}` is neither an address nor a range: write 192.0.2.10 or 192.0.2.0/24"))
}

fn endpoint(text: &str) -> Result<(IpAddr, Option<u16>), String> {
    if let Ok(address) = text.parse::<SocketAddr>() {
        return Ok((address.ip(), Some(address.port())));
    }
    let ip =
        text.parse().map_err(|_| format!("`{text}` is no endpoint: write 10.244.1.2 or 10.244.1.2:8080"))?;
    Ok((ip, None))
}

impl Arguments {
    pub(super) fn execute(self) -> Result<()> {
        let pinned = self.view.pinned()?;
        let names = service_names(&pinned)?;
        if let Some(name) = &self.service
            && !names.values().any(|key| view::is_named(key, name))
        {
            anyhow::bail!("no Service {name} is in the maps: see `services` for all of them");
        }
        let limit = self.limit.unwrap_or(usize::MAX);
        let mut flows = Vec::new();
        Flow::each(&pinned, |flow| {
            if flows.len() < limit && self.wants(&flow, names.get(&flow.service)) {
                flows.push(flow);
            }
        })?;
        let mut devices = BTreeMap::new();
        for (ifindex, _) in flows.iter().filter_map(|flow| flow.hop) {
            devices
                .entry(ifindex)
                .or_insert_with(|| device_name(ifindex).unwrap_or_else(|| format!("#{ifindex}")));
        }
        let show = Show { names, devices, nodes: Nodes::read(&pinned)? };
        if self.view.json() {
            return view::print(|out| {
                // One flow is written per line: a full table is large.
                out.write_all(b"[")?;
                for (place, flow) in flows.iter().enumerate() {
                    out.write_all(if place == 0 { b"\n" } else { b",\n" })?;
                    serde_json::to_writer(&mut *out, &show.document(flow))?;
                }
                out.write_all(b"\n]\n")
            });
        }
        let header = [
            "SERVICE", "PROTO", "CLIENT", "FRONTEND", "ENDPOINT", "SOURCE", "STATE", "IDLE", "PACKETS",
            "BYTES", "NEXT HOP",
        ];
        view::print(|out| view::table(out, header, &flows, |flow| show.row(flow)))
    }

    fn wants(&self, flow: &Flow, key: Option<&ServicePortKey>) -> bool {
        self.service.as_ref().is_none_or(|name| key.is_some_and(|key| view::is_named(key, name)))
            && self.client.is_none_or(|net| net.contains(&flow.client.ip()))
            && self.endpoint.is_none_or(|(ip, port)| {
                flow.endpoint.ip() == ip && port.is_none_or(|port| flow.endpoint.port() == port)
            })
            && self.state.is_none_or(|state| match state {
                State::Is(state) => flow.state == state,
                State::Removed => flow.removed,
            })
    }
}

/// Names for the numbers in flows.
struct Show {
    names: BTreeMap<u32, ServicePortKey>,
    devices: BTreeMap<u32, String>,
    nodes: Nodes,
}

/// A flow, for programs.
#[derive(Serialize)]
struct Document<'a> {
    /// `namespace/name:port`; `None` if the Service no longer exists.
    service: Option<String>,
    protocol: String,
    client: SocketAddr,
    frontend: SocketAddr,
    endpoint: SocketAddr,
    /// The source address that the endpoint sees.
    source: SocketAddr,
    /// `forwarded` to another node, `direct` or `tunnel` if directly, `delivered` on this one, or
    /// left to `conntrack`, under which it began with kube-proxy.
    kind: &'static str,
    /// Dispatch of a direct flow: `ipip`, `udp` or `l2`; `None` for others.
    dispatch: Option<&'static str>,
    /// Whether another node is in front, and packets are sent on to an owner of the connection.
    to_owner: bool,
    /// Whether replies of an endpoint here go back through the node in front.
    tunnelled: bool,
    state: &'static str,
    /// Whether the endpoint was removed and takes no new connections.
    removed: bool,
    idle_seconds: f64,
    request_packets: u64,
    request_bytes: u64,
    reply_packets: u64,
    reply_bytes: u64,
    device: Option<&'a str>,
    next_hop: Option<IpAddr>,
    /// The name of the endpoint's node; `None` if it is this one, or the endpoint has no
    /// `nodeName`.
    node: Option<&'a str>,
}

impl Show {
    fn document(&self, flow: &Flow) -> Document<'_> {
        Document {
            service: self.names.get(&flow.service).map(ToString::to_string),
            protocol: flow.protocol.to_string(),
            client: flow.client,
            frontend: flow.frontend,
            endpoint: flow.endpoint,
            source: flow.source,
            kind: kind(flow.kind),
            dispatch: flow.dispatch.map(Dispatch::name),
            to_owner: flow.to_owner,
            tunnelled: flow.tunnelled,
            state: flow.state.name(),
            removed: flow.removed,
            idle_seconds: flow.idle.as_secs_f64(),
            request_packets: flow.request.packets,
            request_bytes: flow.request.bytes,
            reply_packets: flow.reply.map_or(0, |reply| reply.packets),
            reply_bytes: flow.reply.map_or(0, |reply| reply.bytes),
            device: flow.hop.and_then(|(ifindex, _)| self.devices.get(&ifindex)).map(String::as_str),
            next_hop: flow.hop.map(|(_, gateway)| gateway),
            node: self.nodes.name(flow.node),
        }
    }

    fn row(&self, flow: &Flow) -> [String; 11] {
        let reply = flow.reply.unwrap_or(traffic_policy_dataplane::inspect::Traffic { packets: 0, bytes: 0 });
        let mut state = flow.state.name().to_owned();
        for (flag, text) in [
            (flow.removed, ", removed"),
            (
                flow.reply.is_none() && !matches!(flow.kind, FlowKind::Direct | FlowKind::Tunnel),
                ", no reply entry",
            ),
        ] {
            if flag {
                state += text;
            }
        }
        let mut next = match (flow.kind, flow.hop) {
            (FlowKind::Delivered, _) => "this node".to_owned(),
            (FlowKind::Conntrack, _) => "conntrack".to_owned(),
            (_, None) => "not resolved".to_owned(),
            (_, Some((ifindex, gateway))) => {
                format!("{gateway} by {}", self.devices.get(&ifindex).map_or("?", String::as_str))
            }
        };
        let dispatch = flow.dispatch.map(Dispatch::name);
        for word in dispatch.into_iter().chain(flow.to_owner.then_some("to owner")) {
            next += &format!(", {word}");
        }
        if flow.tunnelled {
            next += ", replies through the node in front";
        }
        [
            self.names.get(&flow.service).map_or_else(|| "(gone)".to_owned(), ToString::to_string),
            flow.protocol.to_string(),
            flow.client.to_string(),
            flow.frontend.to_string(),
            flow.endpoint.to_string(),
            flow.source.to_string(),
            state,
            view::span(flow.idle),
            format!("{} / {}", flow.request.packets, reply.packets),
            format!("{} / {}", flow.request.bytes, reply.bytes),
            next,
        ]
    }
}

const fn kind(kind: FlowKind) -> &'static str {
    match kind {
        FlowKind::Forwarded => "forwarded",
        FlowKind::Direct => "direct",
        FlowKind::Tunnel => "tunnel",
        FlowKind::Delivered => "delivered",
        FlowKind::Conntrack => "conntrack",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::Parser;
    use traffic_policy_cluster::model::{Protocol, ServiceName};
    use traffic_policy_dataplane::inspect::Traffic;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn flow() -> Flow {
        Flow {
            service: 3,
            protocol: Protocol::Tcp,
            client: "192.0.2.10:40000".parse().unwrap(),
            frontend: "172.18.0.11:30080".parse().unwrap(),
            endpoint: "10.244.2.2:8080".parse().unwrap(),
            source: "172.18.0.11:5555".parse().unwrap(),
            kind: FlowKind::Forwarded,
            state: FlowState::Assured,
            removed: true,
            idle: Duration::from_millis(1500),
            request: Traffic { packets: 3, bytes: 180 },
            reply: Some(Traffic { packets: 2, bytes: 120 }),
            hop: Some((7, "172.18.0.12".parse().unwrap())),
            node: 2,
            dispatch: None,
            to_owner: false,
            tunnelled: false,
        }
    }

    fn key() -> ServicePortKey {
        ServicePortKey {
            service: ServiceName { namespace: "shop".to_owned(), name: "web".to_owned() },
            port: "http".to_owned(),
            protocol: Protocol::Tcp,
            ipv6: false,
        }
    }

    #[test]
    fn filters() {
        for (arguments, wanted) in [
            (vec![], true),
            (vec!["--service", "shop/web"], true),
            (vec!["--service", "api"], false),
            (vec!["--client", "192.0.2.0/24"], true),
            (vec!["--client", "192.0.2.11"], false),
            (vec!["--client", "2001:db8::/32"], false),
            (vec!["--endpoint", "10.244.2.2"], true),
            (vec!["--endpoint", "10.244.2.2:8081"], false),
            (vec!["--state", "assured"], true),
            (vec!["--state", "removed"], true),
            (vec!["--state", "gone"], true),
            (vec!["--state", "closing"], false),
        ] {
            let line = Line::try_parse_from([&["flows"], arguments.as_slice()].concat());
            let arguments_are = line.unwrap_or_else(|error| panic!("{error}")).arguments;
            assert_eq!(arguments_are.wants(&flow(), Some(&key())), wanted, "{arguments:?}");
        }
        for wrong in [["--client", "home"], ["--endpoint", "10.244.2"], ["--state", "open"]] {
            assert!(Line::try_parse_from([&["flows"][..], &wrong].concat()).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_row_and_a_document() {
        let show = Show {
            names: [(3, key())].into(),
            devices: [(7, "eth0".to_owned())].into(),
            nodes: Nodes::of(&[(2, "node-2", false)]),
        };
        let row = show.row(&flow());
        assert_eq!(row[0], "shop/web:http");
        assert_eq!(row[6..], ["assured, removed", "1.5s", "3 / 2", "180 / 120", "172.18.0.12 by eth0"]);
        let udp = Flow { kind: FlowKind::Direct, dispatch: Some(Dispatch::Udp), to_owner: true, ..flow() };
        assert_eq!(show.row(&udp)[10], "172.18.0.12 by eth0, udp, to owner");
        let document = serde_json::to_value(show.document(&udp)).unwrap();
        assert_eq!((&document["dispatch"], &document["to_owner"]), (&"udp".into(), &true.into()));
        let tunnelled = Flow { kind: FlowKind::Delivered, tunnelled: true, ..flow() };
        assert_eq!(show.row(&tunnelled)[10], "this node, replies through the node in front");
        let delivered = Flow { kind: FlowKind::Delivered, hop: None, reply: None, service: 9, ..flow() };
        let row = show.row(&delivered);
        assert_eq!(
            (row[0].as_str(), row[6].as_str(), row[10].as_str()),
            ("(gone)", "assured, removed, no reply entry", "this node")
        );
        let document = serde_json::to_value(show.document(&flow())).unwrap();
        assert_eq!(document["endpoint"], "10.244.2.2:8080");
        assert_eq!(document["idle_seconds"], 1.5);
        assert_eq!((&document["removed"], &document["gone"]), (&true.into(), &serde_json::Value::Null));
        assert_eq!(document["node"], "node-2");
        let elsewhere = serde_json::to_value(show.document(&Flow { node: 16_384, ..flow() })).unwrap();
        assert_eq!(elsewhere["node"], serde_json::Value::Null, "the place of a next hop");
        assert_eq!((&document["device"], &document["next_hop"]), (&"eth0".into(), &"172.18.0.12".into()));
    }
}
