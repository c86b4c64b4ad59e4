//! Connections of clients: HTTP/1.1, and HTTP/2 where both ends chose it (ALPN). Their bytes and
//! requests are counted.

use std::{
    convert::Infallible,
    io::{self, Write},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
};

use flate2::{Compression, write::GzEncoder};
use http_body_util::{BodyExt, Full};
use hyper::{
    Request, Response, Version,
    body::{Body as _, Incoming},
    header::{ACCEPT_ENCODING, CONTENT_ENCODING, HeaderValue},
    service::service_fn,
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};
use tokio_rustls::TlsAcceptor;

use super::{
    Shared,
    http::{Body, answer},
};

/// Bodies of at least this many bytes are compressed for clients that accept it, as real API
/// servers do.
const COMPRESSED: u64 = 128 * 1024;

/// Bytes and requests of all connections so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Accepted connections.
    pub connections: u64,
    /// Requests, and those among them that used HTTP/2.
    pub requests: u64,
    pub multiplexed: u64,
    /// Bodies that were compressed.
    pub compressed: u64,
    /// Bytes of TCP, TLS included, to and from clients.
    pub sent: u64,
    pub received: u64,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    connections: AtomicU64,
    requests: AtomicU64,
    multiplexed: AtomicU64,
    compressed: AtomicU64,
    sent: AtomicU64,
    received: AtomicU64,
}

impl Counters {
    pub(super) fn get(&self) -> Traffic {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Traffic {
            connections: load(&self.connections),
            requests: load(&self.requests),
            multiplexed: load(&self.multiplexed),
            compressed: load(&self.compressed),
            sent: load(&self.sent),
            received: load(&self.received),
        }
    }
}

fn add(counter: &AtomicU64, more: usize) {
    counter.fetch_add(u64::try_from(more).unwrap_or(0), Ordering::Relaxed);
}

/// Serves until the task is aborted; its connections break with it.
pub(super) async fn serve(listener: TcpListener, tls: Option<TlsAcceptor>, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        add(&shared.counters.connections, 1);
        let (tls, shared) = (tls.clone(), Arc::clone(&shared));
        // Go's servers set it, too. Without it an answer may wait for an acknowledgement.
        let _ = stream.set_nodelay(true);
        let stream = Counted { stream, shared: Arc::clone(&shared) };
        connections.spawn(async move {
            match tls {
                None => connection(stream, shared).await,
                Some(tls) => {
                    if let Ok(stream) = tls.accept(stream).await {
                        connection(stream, shared).await;
                    }
                }
            }
        });
        while connections.try_join_next().is_some() {}
    }
}

async fn connection(io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, shared: Arc<Shared>) {
    let service = service_fn(move |request: Request<Incoming>| {
        let shared = Arc::clone(&shared);
        async move {
            add(&shared.counters.requests, 1);
            add(&shared.counters.multiplexed, usize::from(request.version() == Version::HTTP_2));
            let takes = request.headers().get(ACCEPT_ENCODING).and_then(|value| value.to_str().ok());
            let gzip = takes.is_some_and(|takes| takes.contains("gzip"));
            let response = answer(Arc::clone(&shared), request).await;
            Ok::<_, Infallible>(if gzip { compressed(response, &shared).await } else { response })
        }
    });
    // A client that breaks off is not a fault of the server.
    let _ = auto::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(io), service).await;
}

async fn compressed(response: Response<Body>, shared: &Shared) -> Response<Body> {
    // A watch has no size.
    if response.body().size_hint().exact().is_none_or(|size| size < COMPRESSED) {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    let bytes = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    // Real API servers use the fastest level, too.
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    let written = encoder.write_all(&bytes).and_then(|()| encoder.finish());
    let bytes = written.map_or(bytes, |compressed| {
        add(&shared.counters.compressed, 1);
        parts.headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        compressed.into()
    });
    Response::from_parts(parts, Full::new(bytes).map_err(|never| match never {}).boxed_unsync())
}

/// A connection whose bytes are counted.
struct Counted {
    stream: TcpStream,
    shared: Arc<Shared>,
}

impl AsyncRead for Counted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        add(&self.shared.counters.received, buffer.filled().len() - before);
        read
    }
}

impl AsyncWrite for Counted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        if let Poll::Ready(Ok(written)) = &written {
            add(&self.shared.counters.sent, *written);
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
