//! A connector that makes one connection for all requests if the server supports HTTP/2, as in
//! client-go: all watches of a node share it.
//!
//! The protocol is known only when a connection has been made (ALPN). Watches begin together, so
//! each of them would make one first. Here one is made after the other, and a request that waits
//! while an HTTP/2 connection is made uses that one.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Poll},
    time::Duration,
};

use hyper::{
    Uri,
    rt::{Read, ReadBufCursor, Write},
};
use hyper_util::client::legacy::connect::{Connected, Connection};
use tokio::{
    sync::Mutex,
    time::{Instant, sleep, timeout},
};
use tower::{BoxError, Service};

use super::deadline::ANSWER;

/// The time from the end of a TLS handshake within which other requests find the connection.
const SETTLED: Duration = Duration::from_secs(1);

/// A connector that makes one connection at a time.
#[derive(Clone, Debug)]
pub(super) struct OneByOne<C> {
    connector: C,
    last: Arc<Mutex<Option<Shared>>>,
}

/// An HTTP/2 connection.
#[derive(Debug)]
struct Shared {
    made: Instant,
    open: Weak<()>,
}

impl Shared {
    /// Whether a request that came to this connector at `asked` will get this connection. A later
    /// one cannot: the server may have announced that it takes no more requests on it, with watches
    /// still open.
    fn serves(&self, asked: Instant) -> bool {
        self.open.strong_count() > 0 && asked < self.made + SETTLED
    }
}

impl<C> OneByOne<C> {
    pub(super) fn new(connector: C) -> Self {
        Self { connector, last: Arc::default() }
    }
}

impl<C> Service<Uri> for OneByOne<C>
where
    C: Service<Uri>,
    C::Response: Connection + Send,
    C::Error: Into<BoxError>,
    C::Future: Send + 'static,
{
    type Response = Counted<C::Response>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.connector.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        // The future does nothing before it is polled.
        let connection = self.connector.call(uri);
        let (last, asked) = (Arc::clone(&self.last), Instant::now());
        Box::pin(async move {
            let mut turn = last.lock().await;
            if turn.as_ref().is_some_and(|shared| shared.serves(asked)) {
                drop(turn);
                // The request behind this call gets the other connection as soon as that is in the
                // pool, or fails.
                sleep(ANSWER).await;
                return Err("the connection that another request has made cannot be used".into());
            }
            // The connector's time-out is that of TCP: a stalled TLS handshake would hold up all
            // other requests.
            let stream = timeout(ANSWER, connection).await?.map_err(Into::into)?;
            let open = Arc::new(());
            if stream.connected().is_negotiated_h2() {
                *turn = Some(Shared { made: Instant::now(), open: Arc::downgrade(&open) });
            }
            Ok(Counted { stream, _open: open })
        })
    }
}

/// A stream whose existence shows that it is open.
pub(super) struct Counted<S> {
    stream: S,
    _open: Arc<()>,
}

impl<S: Connection> Connection for Counted<S> {
    fn connected(&self) -> Connected {
        self.stream.connected()
    }
}

impl<S: Read + Unpin> Read for Counted<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: Write + Unpin> Write for Counted<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, buffers)
    }
}
