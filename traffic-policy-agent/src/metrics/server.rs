//! The HTTP server of `--metrics-address`.

use std::{io, net::SocketAddr};

use http_body_util::Full;
use hyper::{
    Request, Response,
    body::{Bytes, Incoming},
    header::{CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS},
};

use super::{Metrics, exposition};
use crate::health::{Answer, Served, not_found};

/// What `/proxyMode` says, where kube-proxy names its backend.
const MODE: &str = "ebpf";

/// Answers `/metrics`, `/proxyMode` and `/healthz`, as kube-proxy's metrics server does.
#[derive(Debug)]
pub struct MetricsServer(Served);

impl MetricsServer {
    /// Starts to answer.
    ///
    /// # Errors
    ///
    /// If the address cannot be listened on.
    pub fn start(address: SocketAddr, metrics: Metrics) -> io::Result<Self> {
        Served::start(address, move |request: &Request<Incoming>| match request.uri().path() {
            "/metrics" => text(metrics.render(), exposition::CONTENT_TYPE),
            "/proxyMode" => text(MODE.to_owned(), "text/plain; charset=utf-8"),
            // That this server answers, no more: whether the proxy keeps up is asked elsewhere (--healthz-address).
            "/healthz" => text("ok".to_owned(), "text/plain; charset=utf-8"),
            _ => not_found(request.method()),
        })
        .map(Self)
    }

    /// The address listened on, with the port that was chosen if 0 was asked for.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.0.address()
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
    use super::*;
    use crate::health::{ProxyHealth, tests::get};

    #[tokio::test]
    async fn metrics_mode_and_health() {
        let metrics = Metrics::new("here".to_owned(), ProxyHealth::new(true, true));
        let server = MetricsServer::start("127.0.0.1:0".parse().unwrap(), metrics).unwrap();
        let scrape = get(server.address(), "/metrics").await;
        let (head, body) = scrape.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        assert!(head.contains("Content-Type: text/plain; version=0.0.4; charset=utf-8"), "{head}");
        assert!(body.contains("\ntraffic_policy_node_info{node=\"here\"} 1\n"), "{body}");
        for (path, body) in [("/proxyMode", "ebpf"), ("/healthz", "ok")] {
            let answer = get(server.address(), path).await;
            assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
            assert_eq!(answer.split_once("\r\n\r\n").unwrap().1, body);
        }
        assert!(get(server.address(), "/").await.starts_with("HTTP/1.1 404 Not Found\r\n"));
    }
}
