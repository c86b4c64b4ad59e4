//! Requests to the listeners of this node's agent.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use http_body_util::{BodyExt as _, Empty};
use hyper::{Request, StatusCode, body::Bytes, client::conn::http1, header::HOST};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, time::timeout};

/// Returns the body of the answer to a request for a path. The unspecified address stands for this
/// node.
///
/// # Errors
/// No answer arrives in time, or its status is not 200.
pub(super) fn get(address: SocketAddr, path: &str, patience: Duration) -> Result<Bytes> {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    let address = SocketAddr::new(ip, address.port());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let answer = runtime.block_on(async { timeout(patience, exchange(address, path)).await });
    let (status, body) = answer
        .map_err(anyhow::Error::from)
        .flatten()
        .with_context(|| format!("{address} does not answer"))?;
    if status != StatusCode::OK {
        bail!("{address} answers `{status}`");
    }
    Ok(body)
}

async fn exchange(address: SocketAddr, path: &str) -> Result<(StatusCode, Bytes)> {
    let stream = TokioIo::new(TcpStream::connect(address).await?);
    let (mut sender, connection) = http1::handshake(stream).await?;
    let request = Request::get(path).header(HOST, address.to_string()).body(Empty::<Bytes>::new())?;
    let exchange = async {
        let response = sender.send_request(request).await?;
        let status = response.status();
        Ok::<_, anyhow::Error>((status, response.into_body().collect().await?.to_bytes()))
    };
    tokio::select! {
        answer = exchange => answer,
        // If the connection ends without an answer, its own error explains that better than the
        // sender's.
        Err(error) = connection => Err(error.into()),
    }
}
