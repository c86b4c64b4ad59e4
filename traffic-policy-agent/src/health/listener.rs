//! A small HTTP server on one address that can be closed without leaving the port in use.

use std::{
    convert::Infallible,
    future::ready,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header::{CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinHandle,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::connections::{Connections, Place};

/// Longest lifetime of a connection: a client that reads an answer byte by byte is disconnected
/// then.
const LIFETIME: Duration = Duration::from_secs(60);

/// Grace period of requests in progress after their port is closed.
const GRACE: Duration = Duration::from_secs(1);

/// Time left for an evicted connection: for a request that was sent when the connection was opened,
/// and is not read yet.
const LEAVE: Duration = Duration::from_millis(50);

/// Connections that wait to be accepted; the kernel takes no more than net.core.somaxconn.
const BACKLOG: i32 = 4096;

/// A listening port and its task. Dropping it closes the port after a short delay.
#[derive(Debug)]
pub struct Served {
    address: SocketAddr,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

/// A whole answer.
pub type Answer = Response<Full<Bytes>>;

impl Served {
    /// Time limit for a request's headers, and for an idle connection. Probes send at once.
    pub const HEADER_TIMEOUT: Duration = Duration::from_secs(2);
    /// Maximum size of a request's headers in bytes. hyper alone would take 400 KiB of each
    /// connection.
    pub const HEADERS: usize = 16 << 10;

    /// Listens on `address` (the unspecified IPv4 address stands for both families), and answers
    /// every request with the result of `answer`.
    pub fn start(
        address: SocketAddr,
        connections: Arc<Connections>,
        answer: impl Fn(&Request<Incoming>) -> Answer + Send + Sync + 'static,
    ) -> io::Result<Self> {
        Self::start_slow(address, connections, move |request| ready(answer(&request)))
    }

    /// Does the same as [`Self::start`] for answers that take long, so that no thread of the
    /// runtime blocks on them.
    pub fn start_slow<R>(
        address: SocketAddr,
        connections: Arc<Connections>,
        answer: impl Fn(Request<Incoming>) -> R + Send + Sync + 'static,
    ) -> io::Result<Self>
    where
        R: Future<Output = Answer> + Send + 'static,
    {
        let listener = bind(address)?;
        let address = listener.local_addr()?;
        let stop = CancellationToken::new();
        let task = tokio::spawn(accept(listener, connections, Arc::new(answer), stop.clone()));
        Ok(Self { address, stop, task })
    }

    /// Returns the address listened on, with the port that was chosen if 0 was requested.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Lets the port close: the first half of [`Self::close`].
    pub fn stop(&self) {
        self.stop.cancel();
    }

    /// Closes the port, and returns when it is free, which takes no longer than another task takes
    /// to be run: a request that arrived before is still answered, but not waited for.
    pub async fn close(mut self) {
        self.stop();
        // The task is joined, not aborted: the port is free only when the task has dropped it.
        let _ = (&mut self.task).await;
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Listens on both families if the address is unspecified, as kube-proxy does, else on that address
/// only.
fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let dual = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => {
            SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), address.port())
        }
        _ => address,
    };
    match listen(dual) {
        // The kernel has no IPv6.
        Err(error)
            if dual.ip() == Ipv6Addr::UNSPECIFIED
                && matches!(error.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL)) =>
        {
            listen(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), address.port()))
        }
        result => result,
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
    if address.ip() == Ipv6Addr::UNSPECIFIED {
        // The option does not depend on net.ipv6.bindv6only.
        socket.set_only_v6(false)?;
    }
    // Connections of an earlier listener linger in TIME_WAIT; they must not occupy the port.
    socket.set_reuse_address(true)?;
    // An IPv6 address of this node may still be tentative.
    if address.is_ipv6() {
        socket.set_freebind_v6(true)?;
    } else {
        socket.set_freebind_v4(true)?;
    }
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

async fn accept<F, R>(
    listener: TcpListener,
    connections: Arc<Connections>,
    answer: Arc<F>,
    stop: CancellationToken,
) where
    F: Fn(Request<Incoming>) -> R + Send + Sync + 'static,
    R: Future<Output = Answer> + Send + 'static,
{
    let port = listener.local_addr().map_or(0, |own| own.port());
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) => {
                    let place = connections.enter(port, peer.ip());
                    tokio::spawn(serve(stream, peer, place, Arc::clone(&answer), stop.clone()));
                }
                Err(error) => {
                    // The process is most likely out of file descriptors: others get time to close
                    // theirs.
                    debug!("accept: {error}");
                    sleep(Duration::from_millis(100)).await;
                }
            },
        }
    }
}

/// Whether a request comes from this node itself: over loopback, or from the address to which it is
/// sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct FromHere(pub(super) bool);

impl FromHere {
    fn of(stream: &TcpStream, peer: SocketAddr) -> Self {
        let peer = peer.ip().to_canonical();
        Self(peer.is_loopback() || stream.local_addr().is_ok_and(|own| own.ip().to_canonical() == peer))
    }
}

async fn serve<F, R>(
    stream: TcpStream,
    peer: SocketAddr,
    place: Place,
    answer: Arc<F>,
    stop: CancellationToken,
) where
    F: Fn(Request<Incoming>) -> R,
    R: Future<Output = Answer>,
{
    let from_here = FromHere::of(&stream, peer);
    let service = service_fn(|mut request| {
        place.answering.store(true, Ordering::Relaxed);
        request.extensions_mut().insert(from_here);
        let answer = answer(request);
        let answering = &place.answering;
        async move {
            let answer = answer.await;
            answering.store(false, Ordering::Relaxed);
            Ok::<_, Infallible>(answer)
        }
    });
    let connection = http1::Builder::new()
        // Load balancers compare header names without regard to case; people do not.
        .title_case_headers(true)
        .timer(TokioTimer::new())
        .header_read_timeout(Served::HEADER_TIMEOUT)
        .max_buf_size(Served::HEADERS)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    tokio::select! {
        result = timeout(LIFETIME, &mut connection) => {
            if let Ok(Err(error)) = result {
                debug!("connection: {error}");
            }
            return;
        }
        () = place.evicted.cancelled() => {
            debug!(%peer, "connection: evicted");
            // hyper's graceful shutdown is not used: it ends a connection of which nothing has been
            // read.
            let Some(_leave) = place.leave() else { return };
            let _ = timeout(LEAVE, connection).await;
            return;
        }
        () = stop.cancelled() => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = timeout(GRACE, connection).await;
}

/// Returns a JSON answer with the headers of kube-proxy.
pub(super) fn json(status: StatusCode, body: String) -> Answer {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// Returns the answer of Go's HTTP server for an unknown path.
pub(crate) fn not_found(method: &Method) -> Answer {
    let body = if method == Method::HEAD { "" } else { "404 page not found\n" };
    let mut response = Response::new(Full::new(Bytes::from_static(body.as_bytes())));
    *response.status_mut() = StatusCode::NOT_FOUND;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::Write as _;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// Sends one request as a load balancer does; returns the whole answer as text.
    pub(crate) async fn get(address: SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    pub(in crate::health) fn localhost(port: u16) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, port))
    }

    fn any() -> SocketAddr {
        SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))
    }

    fn hello(_: &Request<Incoming>) -> Answer {
        Response::new(Full::new(Bytes::from_static(b"hello")))
    }

    /// Waits until this number of connections has been accepted.
    pub(in crate::health) async fn until_open(connections: &Connections, number: usize) {
        let waiting = async {
            while connections.count() != number {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(Duration::from_secs(20), waiting).await.unwrap();
    }

    /// More connections of one peer than have a place are accepted before any of them is served:
    /// each that has sent its request is answered.
    #[tokio::test]
    async fn requests_of_a_burst_are_answered() {
        let served = Served::start(any(), Arc::default(), hello).unwrap();
        let to = localhost(served.address().port());
        // The sockets are blocking: until they are read, the one thread of this runtime neither
        // accepts nor serves.
        let burst: Vec<_> = (0..4 * Connections::PER_PEER)
            .map(|_| {
                let mut stream = std::net::TcpStream::connect(to).unwrap();
                stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
                stream.set_nonblocking(true).unwrap();
                TcpStream::from_std(stream).unwrap()
            })
            .collect();
        let mut answered = 0;
        for mut stream in burst {
            let mut answer = String::new();
            let read = timeout(Duration::from_secs(20), stream.read_to_string(&mut answer)).await.unwrap();
            answered += usize::from(read.is_ok() && answer.ends_with("hello"));
        }
        assert_eq!(answered, 4 * Connections::PER_PEER);
    }

    /// Headers without end are refused before they fill the memory.
    #[tokio::test]
    async fn long_headers_are_refused() {
        let served = Served::start(any(), Arc::default(), hello).unwrap();
        let mut client = TcpStream::connect(localhost(served.address().port())).await.unwrap();
        let request = format!("GET / HTTP/1.1\r\nHost: x\r\nX: {}\r\n\r\n", "x".repeat(2 * Served::HEADERS));
        client.write_all(request.as_bytes()).await.unwrap();
        let mut answer = [0; 12];
        client.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"HTTP/1.1 431");
    }

    #[tokio::test]
    async fn both_families_are_answered() {
        let served = Served::start(any(), Arc::default(), hello).unwrap();
        let port = served.address().port();
        assert!(get(localhost(port), "/").await.ends_with("hello"));
        if !served.address().is_ipv6() {
            // println! is not used: its output is not shown for a test that succeeds.
            writeln!(io::stderr(), "SKIPPED both_families_are_answered: this kernel has no IPv6").unwrap();
        } else {
            assert!(get(SocketAddr::from((Ipv6Addr::LOCALHOST, port)), "/").await.ends_with("hello"));
        }
    }

    /// A client that has sent half a request must not delay the run loop.
    #[tokio::test]
    async fn closing_does_not_wait_for_clients() {
        let connections = Arc::default();
        let served = Served::start(any(), Arc::clone(&connections), hello).unwrap();
        let mut client = TcpStream::connect(localhost(served.address().port())).await.unwrap();
        client.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n").await.unwrap();
        until_open(&connections, 1).await;
        timeout(GRACE / 2, served.close()).await.unwrap();
        // The connection is closed soon after.
        let mut rest = Vec::new();
        timeout(Duration::from_secs(20), client.read_to_end(&mut rest)).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn who_asks_nothing_is_let_go() {
        let served = Served::start(any(), Arc::default(), hello).unwrap();
        let address = localhost(served.address().port());
        let mut idle = TcpStream::connect(address).await.unwrap();
        let mut slow = TcpStream::connect(address).await.unwrap();
        slow.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
        let mut again = TcpStream::connect(address).await.unwrap();
        again.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        for stream in [&mut idle, &mut slow, &mut again] {
            let mut rest = Vec::new();
            timeout(Duration::from_secs(8), stream.read_to_end(&mut rest)).await.unwrap().unwrap();
        }
    }

    #[tokio::test]
    async fn the_port_is_free_after_close() {
        let served = Served::start(any(), Arc::default(), hello).unwrap();
        let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, served.address().port()));
        // Idle connections and those in TIME_WAIT must not occupy the port.
        let _idle = TcpStream::connect(localhost(address.port())).await.unwrap();
        get(localhost(address.port()), "/").await;
        assert_eq!(
            Served::start(address, Arc::default(), hello).unwrap_err().kind(),
            io::ErrorKind::AddrInUse
        );
        timeout(GRACE * 2, served.close()).await.unwrap();
        Served::start(address, Arc::default(), hello).unwrap();
    }
}
