//! The answers of nodes, as far as they can be interpreted.

use serde::Deserialize;
use serde_json::Value;
use traffic_policy_cluster::model::ServiceName;

use crate::Question;

/// The answer to a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    Http(Http),
    /// The connection was accepted, and closed at once.
    Connected,
    /// The connection was refused by an RST or an ICMP error.
    Refused,
    /// No connection was established in time.
    Silence,
    /// A connection was accepted, but no complete answer came in time.
    Hangs,
    /// A router reported the address as unreachable.
    Unreachable,
    /// A response that is not valid HTTP, with the reason.
    Garbled(&'static str),
    /// The Node has no address of the wanted type.
    NoAddress,
    /// This machine could not send the probe, with the reason.
    NotAsked(String),
}

impl Heard {
    /// Returns the nodes whose endpoints an agent leaves out, as it says.
    pub(crate) fn left_out(&self) -> &[String] {
        match self {
            Self::Http(Http { spoken: Spoken::Proxy { left_out, .. }, .. }) => left_out,
            _ => &[],
        }
    }

    /// Whether anything at the address answered at all.
    pub(super) const fn is_contact(&self) -> bool {
        matches!(self, Self::Http(_) | Self::Connected | Self::Refused | Self::Hangs | Self::Garbled(_))
    }
}

/// An HTTP response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Http {
    pub status: u16,
    /// The value of the header `X-Load-Balancing-Endpoint-Weight`.
    pub weight: Option<usize>,
    pub spoken: Spoken,
}

/// The content of a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Spoken {
    /// The body of a `healthCheckNodePort`.
    Service {
        service: ServiceName,
        endpoints: usize,
        /// Whether the proxy is healthy; sent by kube-proxy since 1.27.
        healthy: Option<bool>,
        /// Whether the agent has news that its node is about to go.
        leaving: bool,
    },
    /// The body of `/healthz`.
    Proxy {
        /// Whether the node is eligible; sent by kube-proxy since 1.28.
        eligible: Option<bool>,
        healthy: Option<bool>,
        /// Whether the agent has news that its node is about to go.
        leaving: bool,
        /// Whether the agent hears no other node, and so takes its own for cut off.
        cut_off: bool,
        /// The nodes that do not answer the agent, and whose endpoints it leaves out.
        left_out: Vec<String>,
    },
    Other,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ServiceBody {
    service: Named,
    local_endpoints: usize,
    service_proxy_healthy: Option<bool>,
    /// The agent's own: the reason for which its node is about to go.
    #[serde(default)]
    node_leaving: Value,
}

#[derive(Deserialize)]
struct Named {
    namespace: String,
    name: String,
}

/// Whether the text may be printed as it is: answers are not trusted.
fn is_name(text: &str) -> bool {
    text.len() <= 253 && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.'))
}

impl Named {
    fn is_name(&self) -> bool {
        [&self.namespace, &self.name].iter().all(|part| is_name(part))
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ProxyBody {
    #[serde(rename = "lastUpdated")]
    _last_updated: String,
    #[serde(rename = "currentTime")]
    _current_time: String,
    node_eligible: Option<bool>,
    healthy: Option<bool>,
    // These are the agent's own: they may be missing, or mean something else to another proxy.
    #[serde(default)]
    leaving: Value,
    #[serde(default)]
    cut_off: Value,
    #[serde(default)]
    left_out: Value,
}

impl ProxyBody {
    fn spoken(self) -> Spoken {
        let left_out = self.left_out.as_array().into_iter().flatten().filter_map(Value::as_str);
        Spoken::Proxy {
            eligible: self.node_eligible,
            healthy: self.healthy,
            leaving: self.leaving["reason"].is_string(),
            cut_off: self.cut_off == Value::Bool(true),
            left_out: left_out.filter(|name| is_name(name)).map(str::to_owned).collect(),
        }
    }
}

impl Http {
    /// Interprets the response to a probe.
    #[must_use]
    pub fn read(question: Question, status: u16, weight: Option<&[u8]>, body: &[u8]) -> Self {
        let weight = weight.and_then(|weight| std::str::from_utf8(weight).ok()?.trim().parse().ok());
        let spoken = match question {
            Question::ServiceHealth(_) => match serde_json::from_slice::<ServiceBody>(body) {
                Ok(body) if body.service.is_name() => Spoken::Service {
                    service: ServiceName { namespace: body.service.namespace, name: body.service.name },
                    endpoints: body.local_endpoints,
                    healthy: body.service_proxy_healthy,
                    leaving: body.node_leaving.is_string(),
                },
                _ => Spoken::Other,
            },
            _ => match serde_json::from_slice::<ProxyBody>(body) {
                Ok(body) => body.spoken(),
                Err(_) => Spoken::Other,
            },
        };
        Self { status, weight, spoken }
    }
}
