//! A minimal HTTP client for health ports.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::netns::Namespace;
use crate::pace::scaled;

#[derive(Clone, Debug)]
pub struct Response {
    pub status: u16,
    /// The header lines, with names as the server wrote them.
    pub head: String,
    pub body: String,
}

/// Sends one GET request on a connection of its own.
pub async fn get(server: SocketAddr, path: &str, limit: Duration) -> Result<Response> {
    let exchange = async {
        let mut stream = TcpStream::connect(server).await?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut response = Vec::new();
        stream.read_to_end(&mut response).await?;
        parse(&String::from_utf8_lossy(&response))
    };
    let result = timeout(limit, exchange).await.with_context(|| format!("no answer within {limit:?}"));
    result.and_then(|response| response).with_context(|| format!("GET http://{server}{path}"))
}

/// A variant of [`get`] that runs in a namespace.
pub fn get_from(namespace: &Namespace, server: SocketAddr, path: &str) -> Result<Response> {
    namespace.block_on(async || get(server, path, scaled(Duration::from_secs(3))).await)
}

fn parse(response: &str) -> Result<Response> {
    let (head, body) = response.split_once("\r\n\r\n").context("no complete HTTP response")?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).context("no HTTP status")?;
    Ok(Response { status, head: head.to_owned(), body: body.to_owned() })
}
