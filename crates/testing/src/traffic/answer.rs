//! The answer of a pod: its own identity, and the client as the pod sees it.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use serde_json::{Value, json};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub pod: String,
    pub node: String,
    /// The client's address as the pod sees it.
    pub client: SocketAddr,
    /// The number of segments of this connection that the pod has sent so far and that were lost.
    pub lost: u32,
    /// The client's request.
    pub said: String,
}

impl Answer {
    /// Returns one line of JSON, without the line break.
    pub fn to_line(&self) -> String {
        let Self { pod, node, client, lost, said } = self;
        json!({"pod": pod, "node": node, "client": client, "lost": lost, "said": said}).to_string()
    }

    pub fn parse(line: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(line).with_context(|| format!("not an answer: {line:?}"))?;
        let text = |key: &str| value[key].as_str().with_context(|| format!("no {key} in {line:?}"));
        Ok(Self {
            pod: text("pod")?.to_owned(),
            node: text("node")?.to_owned(),
            client: text("client")?.parse()?,
            lost: value["lost"].as_u64().unwrap_or(0).try_into()?,
            said: text("said")?.to_owned(),
        })
    }
}
