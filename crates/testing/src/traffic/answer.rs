//! A pod's answer: itself, and the client as it sees it.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use serde_json::{Value, json};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub pod: String,
    pub node: String,
    /// The client's address as the pod saw it.
    pub client: SocketAddr,
    /// Segments that the pod has had to send again on this connection so far.
    pub retransmitted: u32,
    /// Request of the client.
    pub said: String,
}

impl Answer {
    /// One line of JSON, without its end.
    pub fn to_line(&self) -> String {
        let Self { pod, node, client, retransmitted, said } = self;
        json!({"pod": pod, "node": node, "client": client, "retransmitted": retransmitted, "said": said})
            .to_string()
    }

    pub fn parse(line: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(line).with_context(|| format!("not an answer: {line:?}"))?;
        let text = |key: &str| value[key].as_str().with_context(|| format!("no {key} in {line:?}"));
        Ok(Self {
            pod: text("pod")?.to_owned(),
            node: text("node")?.to_owned(),
            client: text("client")?.parse()?,
            retransmitted: value["retransmitted"].as_u64().unwrap_or(0).try_into()?,
            said: text("said")?.to_owned(),
        })
    }
}
