//! The flows that `explain` is given, parsed from the command line or from JSON.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
};

use anyhow::{Result, bail};
use serde_json::{Value, value::RawValue};
use traffic_policy_cluster::model::address::parse_ip;

/// The source port of a flow that specifies none.
pub const SOURCE_PORT: u16 = 40_000;

/// The origin of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum From {
    /// A client outside this node: its packets arrive on a device.
    External,
    /// A pod of this node: a socket in its own network namespace.
    Pod,
    /// A pod of this node whose sockets are not seen: its packets are translated at its device
    /// (`--pod-services on`).
    PodPacket,
    /// A process in the node's own network namespace.
    Node,
}

impl From {
    /// Whether the programs of packets decide, rather than those of socket calls.
    pub(super) const fn is_packet(self) -> bool {
        matches!(self, Self::External | Self::PodPacket)
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::External => "external",
            Self::Pod => "pod",
            Self::PodPacket => "pod-packet",
            Self::Node => "node",
        }
    }
}

/// A transport protocol, by its IP protocol number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transport(pub u8);

impl Transport {
    pub const TCP: Self = Self(6);
    pub const UDP: Self = Self(17);
    pub const SCTP: Self = Self(132);
    const NAMES: [(&'static str, u8); 5] =
        [("TCP", 6), ("UDP", 17), ("SCTP", 132), ("ICMP", 1), ("ICMPv6", 58)];

    fn parse(text: &str) -> Option<Self> {
        let named = Self::NAMES.iter().find(|(name, _)| name.eq_ignore_ascii_case(text));
        named.map(|(_, number)| Self(*number)).or_else(|| text.parse().ok().map(Self))
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Self::NAMES.iter().find(|(_, number)| *number == self.0) {
            Some((name, _)) => f.write_str(name),
            None => write!(f, "protocol {}", self.0),
        }
    }
}

/// A packet that a flow may begin with here: the first one of a connection, a datagram, or a later
/// segment of a connection that began on another node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    pub name: String,
    pub source: SocketAddr,
    pub destination: SocketAddr,
    pub transport: Transport,
    /// The origin; `None` if it is to be derived from the source.
    pub from: Option<From>,
    /// Whether it is a later segment of TCP, with ACK in place of SYN.
    pub later: bool,
}

impl Flow {
    /// Parses `<src[:port]> <dst:port[/proto]>`; IPv6 addresses with a port are written as
    /// `[address]:port`.
    ///
    /// # Errors
    /// The error names the part that is not understood.
    pub fn from_arguments(source: &str, destination: &str, from: Option<From>) -> Result<Self> {
        let (destination, transport) = match destination.rsplit_once('/') {
            None => (destination, Transport::TCP),
            Some((rest, name)) => match Transport::parse(name) {
                Some(transport) => (rest, transport),
                None => bail!("`{name}` in `{destination}` is no protocol: write tcp, udp or sctp"),
            },
        };
        let (source_ip, source_port) = split(source)?;
        let (ip, Some(port)) = split(destination)? else {
            bail!("`{destination}` names no port: write ADDRESS:PORT, or [ADDRESS]:PORT for IPv6");
        };
        if source_ip.is_ipv4() != ip.is_ipv4() {
            bail!("`{source}` and `{destination}` are of different IP families");
        }
        Ok(Self {
            name: format!("{source} {destination}"),
            source: SocketAddr::new(source_ip, source_port.unwrap_or(SOURCE_PORT)),
            destination: SocketAddr::new(ip, port),
            transport,
            from,
            later: false,
        })
    }

    /// Makes the packet a later segment of its connection.
    ///
    /// # Errors
    /// The protocol is not TCP.
    pub fn into_later(self) -> Result<Self> {
        if self.transport != Transport::TCP {
            bail!("a later segment is one of TCP, not of {}", self.transport);
        }
        Ok(Self { later: true, ..self })
    }
}

/// Parses an address with an optional port.
fn split(text: &str) -> Result<(IpAddr, Option<u16>)> {
    if let Some(ip) = parse_ip(text.trim_start_matches('[').trim_end_matches(']')) {
        return Ok((ip, None));
    }
    let parts = text.rsplit_once(':').and_then(|(ip, port)| {
        Some((parse_ip(ip.trim_start_matches('[').trim_end_matches(']'))?, port.parse().ok()?))
    });
    match parts {
        Some((ip, port)) => Ok((ip, Some(port))),
        None => bail!("`{text}` is no address: write ADDRESS, ADDRESS:PORT, or [ADDRESS]:PORT for IPv6"),
    }
}

/// Reads flows: an array of objects, or one object per line.
///
/// # Errors
/// The error lists every mistake with its line and field.
pub fn read(text: &str) -> Result<Vec<Flow>> {
    let mut flows = Vec::new();
    let mut mistakes = Vec::new();
    let mut add = |line: usize, text: &str| match flow(text, flows.len() + 1) {
        Ok(flow) => flows.push(flow),
        Err(mistake) => mistakes.push(format!("line {line}: {mistake}")),
    };
    if text.trim_start().starts_with('[') {
        let objects: Vec<&RawValue> = match serde_json::from_str(text) {
            Ok(objects) => objects,
            Err(error) => bail!("the flows are not understood: line {}: {error}", error.line()),
        };
        for object in objects {
            let object = object.get();
            // The object is a slice of `text`.
            let before = object.as_ptr() as usize - text.as_ptr() as usize;
            add(text[..before].matches('\n').count() + 1, object);
        }
    } else {
        for (number, line) in (1..).zip(text.lines()) {
            if !line.trim().is_empty() {
                add(number, line);
            }
        }
    }
    if !mistakes.is_empty() {
        const SHOWN: usize = 20;
        let more = mistakes.len().saturating_sub(SHOWN);
        mistakes.truncate(SHOWN);
        if more > 0 {
            mistakes.push(format!("and {more} more"));
        }
        bail!("the flows are not understood:\n  {}", mistakes.join("\n  "));
    }
    Ok(flows)
}

fn flow(text: &str, number: usize) -> Result<Flow, String> {
    let value: Value = serde_json::from_str(text).map_err(|error| format!("not a JSON object: {error}"))?;
    let object = value.as_object().ok_or("not a JSON object")?;
    let field = |name: &str| object.get(name).filter(|value| !value.is_null());
    let address = |name: &str| -> Result<IpAddr, String> {
        let value = field(name).ok_or(format!("{name} is missing"))?;
        let text = value.as_str().ok_or(format!("{name}: {value} is no address"))?;
        parse_ip(text).ok_or(format!("{name}: `{text}` is no IP address"))
    };
    let port = |name: &str| -> Result<Option<u16>, String> {
        let Some(value) = field(name) else { return Ok(None) };
        let number = value.as_u64().or_else(|| value.as_str()?.parse().ok());
        let port = number.and_then(|number| u16::try_from(number).ok());
        port.map(Some).ok_or(format!("{name}: {value} is no port: write a number from 0 to 65535"))
    };
    let (source, destination) = (address("src")?, address("dst")?);
    if source.is_ipv4() != destination.is_ipv4() {
        return Err(format!("dst: {destination} is of another IP family than src {source}"));
    }
    let transport = match field("proto") {
        None => Transport::TCP,
        Some(value) => {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            Transport::parse(&text)
                .ok_or(format!("proto: `{text}` is no protocol: write TCP, UDP or SCTP"))?
        }
    };
    let to = match port("dport")? {
        Some(port) => port,
        None if [Transport::TCP, Transport::UDP, Transport::SCTP].contains(&transport) => {
            return Err("dport is missing".to_owned());
        }
        None => 0,
    };
    let from = match field("from").map(|value| (value, value.as_str())) {
        None => None,
        Some((_, Some("external"))) => Some(From::External),
        Some((_, Some("pod"))) => Some(From::Pod),
        Some((_, Some("node"))) => Some(From::Node),
        Some((value, _)) => return Err(format!("from: {value} is none of external, pod, node")),
    };
    let name = match field("name") {
        None => format!("flow {number}"),
        Some(Value::String(name)) => name.clone(),
        Some(other) => other.to_string(),
    };
    let later = match field("later") {
        None | Some(Value::Bool(false)) => false,
        Some(Value::Bool(true)) if transport == Transport::TCP => true,
        Some(Value::Bool(true)) => return Err(format!("later: {transport} has no segments")),
        Some(value) => return Err(format!("later: {value} is neither true nor false")),
    };
    Ok(Flow {
        name,
        source: SocketAddr::new(source, port("sport")?.unwrap_or(SOURCE_PORT)),
        destination: SocketAddr::new(destination, to),
        transport,
        from,
        later,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_array_or_lines() {
        let one = r#"{"name":"a","src":"192.0.2.1","dst":"10.96.0.1","dport":80,"proto":"tcp"}"#;
        let other = r#"{"src":"fd00::1","sport":5,"dst":"fd00::2","dport":"53","proto":"UDP","from":"pod"}"#;
        let lines = read(&format!("{one}\n\n{other}\n")).unwrap();
        assert_eq!(lines, read(&format!("\n [{one},\n{other}]")).unwrap());
        assert_eq!(lines[0].source, "192.0.2.1:40000".parse().unwrap());
        assert_eq!(lines[0].transport, Transport::TCP);
        assert_eq!(lines[1].name, "flow 2");
        assert_eq!(lines[1].destination, "[fd00::2]:53".parse().unwrap());
        assert_eq!(lines[1].from, Some(From::Pod));
        let later = one.replace('{', r#"{"later":true,"#);
        assert_eq!(read(&later).unwrap(), [Flow { later: true, ..lines[0].clone() }]);
        assert_eq!(read("").unwrap(), []);
    }

    #[test]
    fn mistakes_name_line_and_field() {
        let mistakes = |text: &str| read(text).unwrap_err().to_string();
        let text = "{\"src\":\"192.0.2.1\",\"dst\":\"10.0.0.1\",\"dport\":80}\n\n{\"src\":\"192.0.2\",\"dst\":\"10.0.0.1\",\"dport\":80}\n{\"src\":\"192.0.2.1\",\"dst\":\"10.0.0.1\",\"dport\":70000}\n";
        assert!(mistakes(text).contains("line 3: src: `192.0.2` is no IP address"), "{}", mistakes(text));
        assert!(mistakes(text).contains("line 4: dport: 70000 is no port"), "{}", mistakes(text));
        assert!(mistakes("{").contains("line 1"));
        assert!(mistakes("[{\"src\":\"::1\"},\n{\"src\":7}]").contains("line 2: src: 7 is no address"));
        let other = "{\"src\":\"::1\",\"dst\":\"10.0.0.1\",\"dport\":80}";
        assert!(mistakes(other).contains("dst: 10.0.0.1 is of another IP family"));
        let from = "{\"src\":\"::1\",\"dst\":\"::2\",\"dport\":80,\"from\":\"moon\"}";
        assert!(mistakes(from).contains("from: \"moon\" is none of external, pod, node"));
        assert!(mistakes("{\"src\":\"::1\",\"dst\":\"::2\"}").contains("dport is missing"));
        let later =
            |more: &str| mistakes(&format!("{{\"src\":\"::1\",\"dst\":\"::2\",\"dport\":80,{more}}}"));
        assert!(later("\"later\":7").contains("later: 7 is neither true nor false"));
        assert!(later("\"later\":true,\"proto\":\"udp\"").contains("later: UDP has no segments"));
        let proto = "{\"src\":\"::1\",\"dst\":\"::2\",\"dport\":80,\"proto\":\"quic\"}";
        assert!(mistakes(proto).contains("proto: `quic`"));
    }

    #[test]
    fn from_the_command_line() {
        let flow = Flow::from_arguments("192.0.2.1", "10.96.0.10:53/udp", None).unwrap();
        assert_eq!((flow.source.port(), flow.transport), (SOURCE_PORT, Transport::UDP));
        let flow = Flow::from_arguments("[fd00::1]:7", "[fd00::2]:80", Some(From::Node)).unwrap();
        assert_eq!(flow.source, "[fd00::1]:7".parse().unwrap());
        assert_eq!(Flow::from_arguments("fd00::1", "[fd00::2]:80", None).unwrap().source.port(), SOURCE_PORT);
        assert!(Flow::from_arguments("::1", "[::2]:80/udp", None).unwrap().into_later().is_err());
        for (source, destination) in [
            ("192.0.2.1", "10.96.0.10"),
            ("here", "10.96.0.10:80"),
            ("::1", "10.0.0.1:80"),
            ("::1", "[::2]:80/x"),
        ] {
            assert!(Flow::from_arguments(source, destination, None).is_err(), "{source} {destination}");
        }
    }
}
