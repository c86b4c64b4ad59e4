//! The client of the API: its connections and their credentials, which follow changes of files.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use http_body_util::BodyExt;
use hyper::{Request, Response};
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client as HttpClient, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use kube::{
    Config,
    client::{Body, ClientBuilder, ConfigExt},
    config::Kubeconfig,
};
use tokio::time::sleep;
use tower::{BoxError, Service, ServiceBuilder, ServiceExt, util::BoxService};
use tower_http::decompression::DecompressionLayer;

use super::{
    access::{Access, AccessError},
    deadline::Answer,
    one_by_one::OneByOne,
};
use crate::source::{stamp::Stamp, status::StatusWriter};

/// TCP keepalive: the idle time before the first probe, and the interval between probes. After
/// three probes without answer, that is 30 s, the connection is broken.
const KEEPALIVE: [Duration; 2] = [Duration::from_secs(15), Duration::from_secs(5)];
const KEEPALIVE_QUESTIONS: u32 = 3;
/// The time limit for the acknowledgement of sent data.
#[cfg(target_os = "linux")]
const UNACKNOWLEDGED: Duration = Duration::from_secs(30);
const CONNECT: Duration = Duration::from_secs(10);
/// The idle time of an HTTP/2 connection before a ping is sent, and the time limit for its answer.
/// The same as client-go's `HTTP2_READ_IDLE_TIMEOUT_SECONDS` and `HTTP2_PING_TIMEOUT_SECONDS`.
const PING: Duration = Duration::from_secs(30);
const PONG: Duration = Duration::from_secs(15);

/// The interval at which the credentials' files are checked. The kubelet replaces its certificate
/// well before it expires.
const LOOK: Duration = Duration::from_secs(5);

pub(super) type Connections = BoxService<Request<Body>, Response<Answer>, BoxError>;

/// Returns the layers of requests except credentials of this agent's own.
///
/// # Errors
/// Certificates cannot be read, or a proxy is configured, which is not supported.
pub(super) fn connections(mut config: Config) -> Result<Connections, kube::Error> {
    if config.proxy_url.is_some() {
        // The error of kube's own client names the missing feature.
        config.default_retry = false;
        ClientBuilder::try_from(config.clone())?;
    }
    let client: HttpClient<_, Body> = HttpClient::builder(TokioExecutor::new())
        .timer(TokioTimer::new())
        // The pool sees no activity from watches for minutes, and their connection must be reused.
        .pool_idle_timeout(None)
        .http2_keep_alive_interval(PING)
        .http2_keep_alive_timeout(PONG)
        .build(OneByOne::new(https(&config)?));
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        // This applies to lists above 128 KiB; watches are not compressed.
        .layer(DecompressionLayer::new())
        .service(client)
        .map_response(|response: Response<_>| response.map(BodyExt::boxed_unsync));
    Ok(BoxService::new(service))
}

/// Returns a connector with TLS if the address requires it, with HTTP/2 if the server supports it,
/// otherwise HTTP/1.1.
fn https(config: &Config) -> Result<HttpsConnector<HttpConnector>, kube::Error> {
    let builder =
        HttpsConnectorBuilder::new().with_tls_config(config.rustls_client_config()?).https_or_http();
    let builder = match &config.tls_server_name {
        None => builder,
        Some(name) => {
            let name =
                name.clone().try_into().map_err(|error| kube::Error::Service(BoxError::from(error)))?;
            builder.with_server_name_resolver(FixedServerNameResolver::new(name))
        }
    };
    Ok(builder.enable_all_versions().wrap_connector(connector()))
}

fn connector() -> HttpConnector {
    let mut connector = HttpConnector::new();
    connector.enforce_http(false);
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(CONNECT));
    connector.set_keepalive(Some(KEEPALIVE[0]));
    connector.set_keepalive_interval(Some(KEEPALIVE[1]));
    connector.set_keepalive_retries(Some(KEEPALIVE_QUESTIONS));
    // On other systems, where no agent runs, keepalive alone must suffice.
    #[cfg(target_os = "linux")]
    connector.set_tcp_user_timeout(Some(UNACKNOWLEDGED));
    connector
}

/// A client that replaces its connections as soon as `next` has new credentials.
pub(super) struct Renewed {
    current: Connections,
    next: Next,
}

pub(super) type Next = Arc<Mutex<Option<Connections>>>;

impl Renewed {
    pub(super) fn new(current: Connections) -> (Self, Next) {
        let next = Next::default();
        (Self { current, next: Arc::clone(&next) }, next)
    }
}

impl Service<Request<Body>> for Renewed {
    type Response = Response<Answer>;
    type Error = BoxError;
    type Future = <Connections as Service<Request<Body>>>::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        if let Some(next) = self.next.lock().unwrap_or_else(PoisonError::into_inner).take() {
            self.current = next;
        }
        self.current.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        self.current.call(request)
    }
}

/// Checks the files of a kubeconfig and those that it names, forever, and replaces the client when
/// one has changed. Open watches continue as long as the API server allows.
pub(super) async fn follow(access: Access, next: Next, status: StatusWriter) {
    const SUBJECT: &str = "kubeconfig";
    let Access::Kubeconfig(path) = &access else { return };
    let mut seen = stamps(path);
    loop {
        sleep(LOOK).await;
        let now = stamps(path);
        if now == seen {
            continue;
        }
        seen = now;
        let renewed = async { Ok::<_, AccessError>(connections(access.config().await?)?) };
        match renewed.await {
            Ok(connections) => {
                *next.lock().unwrap_or_else(PoisonError::into_inner) = Some(connections);
                status.well(SUBJECT, "it can be used again");
                tracing::info!(file = %path.display(), "the credentials for the API server have changed, and are used from now on");
            }
            // Possibly only one of two files has been written: the next change is another chance.
            Err(error) => status.trouble(SUBJECT, format!("the former credentials stay in use: {error}")),
        }
    }
}

/// Returns the stamp of each file that credentials come from; `None`: the file does not exist.
fn stamps(kubeconfig: &Path) -> Vec<(PathBuf, Option<Stamp>)> {
    let mut files = vec![kubeconfig.to_owned()];
    if let Ok(read) = Kubeconfig::read_from(kubeconfig) {
        let clusters = read.clusters.into_iter().filter_map(|named| named.cluster?.certificate_authority);
        let users = read.auth_infos.into_iter().filter_map(|named| named.auth_info);
        let users = users.flat_map(|user| [user.client_certificate, user.client_key]).flatten();
        files.extend(clusters.chain(users).map(PathBuf::from));
    }
    let stamp = |file: PathBuf| {
        let stamp = Stamp::of(&file).ok();
        (file, stamp)
    };
    files.into_iter().map(stamp).collect()
}

#[cfg(test)]
mod tests {
    use socket2::SockRef;

    use super::*;

    /// Keepalive detects a connection whose other end has vanished.
    #[tokio::test]
    async fn connections_ask_whether_the_other_end_is_there() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let uri = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
        let stream = connector().call(uri).await.unwrap();
        let socket = SockRef::from(stream.inner());
        assert!(socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), KEEPALIVE[0]);
        assert_eq!(socket.tcp_keepalive_interval().unwrap(), KEEPALIVE[1]);
        assert_eq!(socket.tcp_keepalive_retries().unwrap(), KEEPALIVE_QUESTIONS);
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(UNACKNOWLEDGED));
    }
}
