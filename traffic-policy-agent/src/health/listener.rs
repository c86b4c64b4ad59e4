//! A small HTTP server on one address, which can be closed without leaving the port taken.

use std::{
    convert::Infallible,
    future::ready,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
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
    task::{JoinHandle, JoinSet},
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::debug;

/// How long a client may take to send a request's headers. Probes send at once; what does not must not pile up.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a request that is being answered may go on after its port is closed.
const GRACE: Duration = Duration::from_secs(1);

/// Connections at once on one port; further ones wait in the kernel's queue.
const CONNECTIONS: usize = 256;

/// A listening port and its task. Dropping it closes the port, a little later.
#[derive(Debug)]
pub struct Served {
    address: SocketAddr,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

/// A whole answer.
pub type Answer = Response<Full<Bytes>>;

impl Served {
    /// Listens on `address` (the unspecified IPv4 address stands for both families), and answers every request with
    /// what `answer` says.
    ///
    /// # Errors
    ///
    /// If the address cannot be listened on, most often because it is taken.
    pub fn start(
        address: SocketAddr,
        answer: impl Fn(&Request<Incoming>) -> Answer + Send + Sync + 'static,
    ) -> io::Result<Self> {
        Self::start_slow(address, move |request| ready(answer(&request)))
    }

    /// The same for answers that take their time, of which no thread of the runtime must have to wait for the end.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn start_slow<R>(
        address: SocketAddr,
        answer: impl Fn(Request<Incoming>) -> R + Send + Sync + 'static,
    ) -> io::Result<Self>
    where
        R: Future<Output = Answer> + Send + 'static,
    {
        let listener = bind(address)?;
        let address = listener.local_addr()?;
        let stop = CancellationToken::new();
        let task = tokio::spawn(accept(listener, Arc::new(answer), stop.clone()));
        Ok(Self { address, stop, task })
    }

    /// The address listened on, with the port that was chosen if 0 was asked for.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes the port, and returns when it is free. A request that came before is still answered.
    pub async fn close(mut self) {
        self.stop.cancel();
        // Joined, not aborted: the port is free only when the task has let go of it.
        let _ = (&mut self.task).await;
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Listens on both families if the address is unspecified, as kube-proxy does, else on that address only.
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
        // Not left to net.ipv6.bindv6only.
        socket.set_only_v6(false)?;
    }
    // Connections of an earlier listener linger in TIME_WAIT; they must not keep the port.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(128)?;
    TcpListener::from_std(socket.into())
}

async fn accept<F, R>(listener: TcpListener, answer: Arc<F>, stop: CancellationToken)
where
    F: Fn(Request<Incoming>) -> R + Send + Sync + 'static,
    R: Future<Output = Answer> + Send + 'static,
{
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept(), if connections.len() < CONNECTIONS => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(serve(stream, Arc::clone(&answer), stop.clone()));
                }
                Err(error) => {
                    // Out of file descriptors, most likely: give others time to close theirs.
                    debug!("accept: {error}");
                    sleep(Duration::from_millis(100)).await;
                }
            },
        }
    }
    drop(listener);
    let _ = timeout(GRACE, async { while connections.join_next().await.is_some() {} }).await;
}

async fn serve<F, R>(stream: TcpStream, answer: Arc<F>, stop: CancellationToken)
where
    F: Fn(Request<Incoming>) -> R,
    R: Future<Output = Answer>,
{
    let service = service_fn(|request| {
        let answer = answer(request);
        async { Ok::<_, Infallible>(answer.await) }
    });
    let connection = http1::Builder::new()
        // Load balancers compare header names without regard to case, people do not.
        .title_case_headers(true)
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    tokio::select! {
        result = &mut connection => {
            if let Err(error) = result {
                debug!("connection: {error}");
            }
            return;
        }
        () = stop.cancelled() => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = connection.await;
}

/// A JSON answer with the headers that kube-proxy gives.
pub(super) fn json(status: StatusCode, body: String) -> Answer {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// As Go's HTTP server answers for a path it does not know.
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
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// One request as a load balancer makes it; the whole answer as text.
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

    #[tokio::test]
    async fn both_families_are_answered() {
        let served = Served::start(any(), hello).unwrap();
        let port = served.address().port();
        assert!(get(localhost(port), "/").await.ends_with("hello"));
        if served.address().is_ipv6() {
            assert!(get(SocketAddr::from((Ipv6Addr::LOCALHOST, port)), "/").await.ends_with("hello"));
        }
    }

    #[tokio::test]
    async fn the_port_is_free_after_close() {
        let served = Served::start(any(), hello).unwrap();
        let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, served.address().port()));
        // Idle connections and those in TIME_WAIT must not keep it.
        let _idle = TcpStream::connect(localhost(address.port())).await.unwrap();
        get(localhost(address.port()), "/").await;
        assert_eq!(Served::start(address, hello).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        timeout(GRACE * 2, served.close()).await.unwrap();
        Served::start(address, hello).unwrap();
    }
}
