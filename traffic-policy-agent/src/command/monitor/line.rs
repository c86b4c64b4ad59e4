//! An event as a line: as JSON, and human-readable.

use std::{
    io::{self, Write},
    net::IpAddr,
};

use anyhow::Result;
use jiff::{SignedDuration, Timestamp};
use serde::Serialize;
use traffic_policy_cluster::model::FrontendKind;
use traffic_policy_dataplane::{
    advice::{self, Context},
    inspect::{Event, ServicePort, device_name},
};

use super::super::view;

/// Converts the time of events into calendar time.
pub struct WallClock {
    wall: Timestamp,
    monotonic: u64,
}

impl WallClock {
    pub fn now() -> Result<Self> {
        Ok(Self { wall: Timestamp::now(), monotonic: traffic_policy_dataplane::monotonic()? })
    }

    fn of(&self, monotonic: u64) -> Timestamp {
        let since = monotonic as i64 - self.monotonic as i64;
        self.wall.checked_add(SignedDuration::from_nanos(since)).unwrap_or(self.wall)
    }
}

/// An event, for programs.
#[derive(Serialize)]
pub struct Line {
    /// Time of the event (RFC 3339).
    time: String,
    outcome: &'static str,
    /// Hook: `xdp`, `ingress`, `egress` or `socket`.
    hook: &'static str,
    /// `namespace/name:port`; `None` if no Service is concerned.
    service: Option<String>,
    /// Kind of frontend: `ClusterIP`, `NodePort`, …
    kind: Option<&'static str>,
    /// The policy that applied at this frontend: `Cluster` or `Local`.
    policy: Option<&'static str>,
    protocol: String,
    /// Address and port of the client; `None` where a socket has no address yet.
    client: Option<String>,
    frontend: String,
    /// Endpoint of a new flow.
    endpoint: Option<String>,
    /// Device on which the packet arrived.
    device: Option<String>,
    /// Cookie of the socket's network namespace.
    netns: Option<u64>,
    reason: String,
    fix: Option<String>,
    /// Events of the same CPU that were suppressed before this one.
    suppressed: u32,
}

impl Line {
    pub fn new(event: &Event, port: Option<&ServicePort>, clock: &WallClock) -> Self {
        let reached = port.and_then(|port| {
            let loopback = |kind| kind == FrontendKind::LoopbackNodePort;
            port.frontends.iter().find(|reached| reached.address == event.frontend).or_else(|| {
                port.frontends
                    .iter()
                    .find(|reached| loopback(reached.kind) && reached.address.port() == event.frontend.port())
            })
        });
        let name = port.map(|port| port.key.service.to_string());
        let device = (event.ifindex != 0)
            .then(|| device_name(event.ifindex).unwrap_or_else(|| format!("#{}", event.ifindex)));
        let context = Context {
            service: name.as_deref(),
            frontend: reached.map(|reached| reached.kind),
            client: Some(event.client.ip()).filter(|ip: &IpAddr| !ip.is_unspecified()),
            device: device.as_deref(),
            socket: event.hook == "socket",
        };
        Self {
            time: format!("{:.3}", clock.of(event.time)),
            outcome: event.outcome.name(),
            hook: event.hook,
            service: port.map(|port| port.key.to_string()),
            kind: reached.map(|reached| view::frontend_kind(kind_of(reached.kind, context.socket))),
            // The external policy does not apply to sockets of this node.
            policy: reached
                .filter(|reached| !context.socket || reached.kind == FrontendKind::ClusterIp)
                .map(|reached| view::policy(reached.policy)),
            protocol: event.protocol.to_string(),
            client: context.client.map(|_| event.client.to_string()),
            frontend: event.frontend.to_string(),
            endpoint: event.endpoint.map(|endpoint| endpoint.to_string()),
            reason: advice::reason(event.outcome, &context),
            fix: advice::fix(event.outcome, &context),
            netns: (event.netns != 0).then_some(event.netns),
            device,
            suppressed: event.suppressed,
        }
    }
}

/// Returns the kind of a frontend as a packet or a call has reached it: a packet to a node port for
/// which this node has no address comes from another node, which has forwarded it directly.
fn kind_of(kind: FrontendKind, by_socket: bool) -> FrontendKind {
    if kind == FrontendKind::LoopbackNodePort && !by_socket { FrontendKind::NodePort } else { kind }
}

/// Prints a line, as JSON or human-readable.
pub fn show(line: &Line, json: bool) -> io::Result<()> {
    // Lines are flushed one at a time, because they may be read as they come.
    let mut out = io::stdout().lock();
    if json {
        serde_json::to_writer(&mut out, line)?;
        writeln!(out)?;
    } else {
        out.write_all(text(line).as_bytes())?;
    }
    out.flush()
}

fn text(line: &Line) -> String {
    let client = line.client.as_deref().unwrap_or("a socket");
    let endpoint = line.endpoint.as_ref().map(|endpoint| format!(" → {endpoint}")).unwrap_or_default();
    let mut text = format!(
        "{}  {:<26} {} {client} → {}{endpoint}",
        line.time, line.outcome, line.protocol, line.frontend
    );
    if let Some(service) = &line.service {
        text += &format!("  {service}");
    }
    if let (Some(kind), Some(policy)) = (line.kind, line.policy) {
        text += &format!(" ({kind}, {policy})");
    }
    match (&line.device, line.netns) {
        (Some(device), _) => text += &format!("  {} {device}", line.hook),
        (None, Some(netns)) => text += &format!("  {} in network namespace {netns}", line.hook),
        (None, None) => {}
    }
    text.push('\n');
    // A new flow needs no explanation.
    if let Some(fix) = &line.fix {
        text += &format!("    why: {}\n    fix: {fix}\n", line.reason);
    }
    if line.suppressed > 0 {
        text += &format!("    {} more events before this one were suppressed\n", line.suppressed);
    }
    text
}

#[cfg(test)]
pub mod tests {
    use traffic_policy_cluster::model::Protocol;
    use traffic_policy_ebpf::outcome::Outcome;

    use super::*;
    use crate::command::view::tests::port;

    pub fn event(outcome: Outcome) -> Event {
        Event {
            time: 3_000_000_000,
            outcome,
            hook: "tc-ingress",
            service: Some(3),
            protocol: Protocol::Tcp,
            client: "192.0.2.10:40000".parse().unwrap(),
            frontend: "172.18.0.13:30080".parse().unwrap(),
            endpoint: None,
            ifindex: 4_000_001,
            netns: 0,
            suppressed: 0,
        }
    }

    fn clock() -> WallClock {
        WallClock { wall: "2026-11-20T13:00:05Z".parse().unwrap(), monotonic: 5_000_000_000 }
    }

    #[test]
    fn a_drop_says_who_why_and_what_to_do() {
        let line = Line::new(&event(Outcome::DroppedNoLocalEndpoint), Some(&port()), &clock());
        let text = text(&line);
        let mut lines = text.lines();
        assert_eq!(
            lines.next().unwrap(),
            "2026-11-20T13:00:03.000Z  dropped-no-local-endpoint  TCP 192.0.2.10:40000 → 172.18.0.13:30080  shop/web:http (NodePort, Local)  tc-ingress #4000001"
        );
        assert!(
            lines.next().unwrap().starts_with("    why: Service shop/web has externalTrafficPolicy: Local")
        );
        assert!(lines.next().unwrap().contains("fix: let the load balancer check the healthCheckNodePort"));
        assert_eq!(lines.next(), None);
    }

    #[test]
    fn a_new_flow_takes_one_line() {
        let event = Event { endpoint: Some("10.244.1.2:8080".parse().unwrap()), ..event(Outcome::Forwarded) };
        let text = text(&Line::new(&event, Some(&port()), &clock()));
        assert_eq!(text.lines().count(), 1);
        assert!(text.contains("172.18.0.13:30080 → 10.244.1.2:8080"), "{text}");
    }

    #[test]
    fn a_socket_has_neither_device_nor_address() {
        let socket = Event {
            hook: "socket",
            ifindex: 0,
            netns: 77,
            client: "0.0.0.0:0".parse().unwrap(),
            suppressed: 12,
            ..event(Outcome::RejectedNoEndpoint)
        };
        let line = Line::new(&socket, None, &clock());
        assert_eq!((line.client.clone(), line.device.clone(), line.netns), (None, None, Some(77)));
        let text = text(&line);
        assert!(
            text.contains("TCP a socket → 172.18.0.13:30080  socket in network namespace 77\n"),
            "{text}"
        );
        assert!(text.contains("12 more events before this one"), "{text}");
    }
}
