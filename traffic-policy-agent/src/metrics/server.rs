//! The HTTP server of `--metrics-address`.

use std::{io, net::SocketAddr, sync::Arc};

use http_body_util::Full;
use hyper::{
    Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header::{CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS},
};

use tokio::{sync::Mutex, task::spawn_blocking};

use super::{exposition, registry::Metrics};
use crate::{
    health::{Answer, Served, not_found},
    in_effect::InEffect,
};

/// Answer of `/proxyMode`, where kube-proxy names its backend.
const MODE: &str = "ebpf";

/// The server of `/metrics`, `/proxyMode`, `/configz` and `/healthz`, like kube-proxy's metrics
/// server.
#[derive(Debug)]
pub struct MetricsServer(Served);

impl MetricsServer {
    /// Starts to answer.
    pub fn start(address: SocketAddr, metrics: Metrics, in_effect: InEffect) -> io::Result<Self> {
        let metrics = Arc::new(Mutex::new(metrics));
        Served::start_slow(address, Arc::default(), move |request| {
            let (metrics, in_effect) = (Arc::clone(&metrics), in_effect.clone());
            async move {
                match request.uri().path() {
                    "/metrics" => scrape(metrics).await,
                    "/configz" => text(in_effect.json(), "application/json"),
                    _ => brief(&request),
                }
            }
        })
        .map(Self)
    }

    /// Returns the address listened on, with the port that was chosen if 0 was requested.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.0.address()
    }
}

/// Answers a scrape. It reads whole flow tables: on a thread of its own, and for one client at a
/// time.
async fn scrape(metrics: Arc<Mutex<Metrics>>) -> Answer {
    let metrics = metrics.lock_owned().await;
    // The scrape continues when the client has disconnected, and holds its turn.
    match spawn_blocking(move || metrics.render()).await {
        Ok(body) => text(body, exposition::CONTENT_TYPE),
        Err(error) => {
            let mut answer = text(format!("{error}\n"), "text/plain; charset=utf-8");
            *answer.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
            answer
        }
    }
}

fn brief(request: &Request<Incoming>) -> Answer {
    match request.uri().path() {
        "/proxyMode" => text(MODE.to_owned(), "text/plain; charset=utf-8"),
        // This shows only that the server answers; --healthz-address reports whether the proxy
        // keeps up.
        "/healthz" => text("ok".to_owned(), "text/plain; charset=utf-8"),
        _ => not_found(request.method()),
    }
}

fn text(body: String, content_type: &'static str) -> Answer {
    let mut answer = Response::new(Full::new(Bytes::from(body)));
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use anyhow::Context as _;

    use super::*;
    use crate::health::{ProxyHealth, tests::get};

    #[tokio::test]
    async fn metrics_mode_and_health() {
        let metrics = Metrics::new("here".to_owned(), ProxyHealth::new(true, true));
        let server =
            MetricsServer::start("127.0.0.1:0".parse().unwrap(), metrics, InEffect::default()).unwrap();
        let scrape = get(server.address(), "/metrics").await;
        let (head, body) = scrape.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        assert!(head.contains("Content-Type: text/plain; version=0.0.4; charset=utf-8"), "{head}");
        assert!(body.contains("\ntraffic_policy_node_info{node=\"here\"} 1\n"), "{body}");
        let settings = InEffect::default().json();
        for (path, body) in [("/proxyMode", "ebpf"), ("/healthz", "ok"), ("/configz", &settings)] {
            let answer = get(server.address(), path).await;
            assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
            assert_eq!(answer.split_once("\r\n\r\n").unwrap().1, body);
        }
        assert!(get(server.address(), "/").await.starts_with("HTTP/1.1 404 Not Found\r\n"));
    }

    /// Full tables take long to read: other requests are answered meanwhile.
    #[tokio::test]
    async fn a_slow_scrape_holds_up_nobody() {
        let metrics = Metrics::new("here".to_owned(), ProxyHealth::new(true, true));
        let (begun, mut begins) = tokio::sync::mpsc::unbounded_channel();
        let (go_on, goes_on) = std::sync::mpsc::channel();
        let goes_on = std::sync::Mutex::new(goes_on);
        metrics.count_packets(move || {
            begun.send(())?;
            goes_on.lock().unwrap().recv_timeout(Duration::from_secs(10)).context("nobody was answered")?;
            Ok(Vec::new())
        });
        let server =
            MetricsServer::start("127.0.0.1:0".parse().unwrap(), metrics, InEffect::default()).unwrap();
        let scrape = tokio::spawn(get(server.address(), "/metrics"));
        begins.recv().await.unwrap();
        assert!(get(server.address(), "/healthz").await.ends_with("ok"));
        go_on.send(()).unwrap();
        let scrape = scrape.await.unwrap();
        assert!(scrape.contains("traffic_policy_map_read_errors_total 0\n"), "{scrape}");
    }
}
