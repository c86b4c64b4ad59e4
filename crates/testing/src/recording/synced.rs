//! The moment at which an agent had written a change, as the agent itself reports it on its health
//! port: it is exact, however late the question is.

use std::net::SocketAddr;

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use k8s_openapi::jiff::Timestamp;
use serde_json::Value;

use crate::netns::Namespace;
use crate::pace::{poll, scaled};
use crate::traffic::http;

/// A moment after which a write is expected.
#[derive(Clone, Copy, Debug)]
pub struct Synced(Timestamp);

impl Synced {
    pub fn now() -> Self {
        Self(Timestamp::now())
    }

    /// Waits until an agent has written since this moment, and returns the time of the write.
    pub fn next(self, from: &Namespace, healthz: SocketAddr) -> Result<Instant> {
        let limit = Duration::from_secs(20);
        let newer = || Ok(last_sync(from, healthz)?.filter(|last| *last > self.0));
        let last: Result<_> = poll(limit, || newer().transpose())
            .with_context(|| format!("the agent at {healthz} has written nothing for {:?}", scaled(limit)))?;
        let ago = Timestamp::now().duration_since(last?).unsigned_abs();
        Instant::now().checked_sub(ago).context("this machine has not run for that long")
    }

    /// The time between this moment and the agent's last write; `None` if the agent has not written
    /// since.
    pub fn until_last(self, from: &Namespace, healthz: SocketAddr) -> Result<Option<Duration>> {
        let last = last_sync(from, healthz)?;
        Ok(last.filter(|last| *last > self.0).map(|last| last.duration_since(self.0).unsigned_abs()))
    }
}

/// The time at which an agent last wrote the maps.
pub fn last_sync(from: &Namespace, healthz: SocketAddr) -> Result<Option<Timestamp>> {
    let response = http::get_from(from, healthz, "/healthz")?;
    let body: Value = serde_json::from_str(&response.body).context("/healthz is no JSON")?;
    let text = body["status"]["IPv4"]["lastUpdated"].as_str();
    let parse = |text: &str| text.parse().with_context(|| format!("/healthz: {text} is no time"));
    text.map(parse).transpose()
}
