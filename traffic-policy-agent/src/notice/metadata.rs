//! A client of a cloud's metadata server: plain HTTP, small answers, and no patience.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::{HeaderMap, Method, Request, StatusCode, body::Bytes};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use tokio::time::timeout;

/// The shortest and longest pause after an error.
pub(super) const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];
/// The time limit of a request that is answered at once.
pub(super) const LIMIT: Duration = Duration::from_secs(5);
/// The largest answer that is read, in bytes.
const MOST: usize = 256 * 1024;

/// The metadata server at one base URL.
#[derive(Clone, Debug)]
pub(super) struct Metadata {
    base: String,
    client: Client<HttpConnector, Empty<Bytes>>,
}

/// An answer, whatever its status.
#[derive(Debug)]
pub(super) struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: String,
}

impl Metadata {
    pub(super) fn new(base: &str) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(LIMIT));
        let client = Client::builder(TokioExecutor::new()).build(connector);
        Self { base: base.trim_end_matches('/').to_owned(), client }
    }

    pub(super) async fn get(&self, path: &str, headers: &[(&str, &str)], limit: Duration) -> Result<Answer> {
        self.ask(Method::GET, path, headers, limit).await
    }

    pub(super) async fn put(&self, path: &str, headers: &[(&str, &str)]) -> Result<Answer> {
        self.ask(Method::PUT, path, headers, LIMIT).await
    }

    async fn ask(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        limit: Duration,
    ) -> Result<Answer> {
        let url = format!("{}{path}", self.base);
        let mut request = Request::builder().method(method).uri(&url);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Empty::new()).with_context(|| url.clone())?;
        let answer = timeout(limit, async {
            let (head, body) = self.client.request(request).await?.into_parts();
            let body = Limited::new(body, MOST).collect().await.map_err(|error| anyhow::anyhow!(error))?;
            let body = String::from_utf8_lossy(&body.to_bytes()).into_owned();
            anyhow::Ok(Answer { status: head.status, headers: head.headers, body })
        });
        match answer.await {
            Ok(answer) => answer.with_context(|| url.clone()),
            Err(_) => bail!("{url}: no answer within {} s", limit.as_secs()),
        }
    }
}

impl Answer {
    /// Returns the body of an answer with status 200.
    pub(super) fn ok(self, path: &str) -> Result<Self> {
        if self.status != StatusCode::OK {
            bail!("{path}: status {}", self.status);
        }
        Ok(self)
    }
}

/// The pauses between attempts: longer after each error, and short again after a success.
#[derive(Debug)]
pub(super) struct Pauses(Duration);

impl Default for Pauses {
    fn default() -> Self {
        Self(PAUSES[0])
    }
}

impl Pauses {
    pub(super) fn succeeded(&mut self) {
        self.0 = PAUSES[0];
    }

    pub(super) fn next(&mut self) -> Duration {
        let pause = self.0;
        self.0 = (pause * 2).min(PAUSES[1]);
        pause
    }
}
