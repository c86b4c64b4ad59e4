//! A layer for every request of the API client: it adds the service account's token, and turns the
//! outcome into the source's status.

use std::{
    error::Error,
    fs,
    path::PathBuf,
    pin::Pin,
    task::{Context, Poll},
};

use hyper::{
    Request, Response,
    header::{AUTHORIZATION, HeaderValue},
};
use tower::{BoxError, Layer, Service};

use crate::source::status::StatusWriter;

/// The subject of connection errors, as opposed to those of one kind of object.
pub(super) const API_SERVER: &str = "API server";

#[derive(Clone, Debug)]
pub(super) struct Observe {
    url: String,
    token: Option<PathBuf>,
    status: StatusWriter,
}

impl Observe {
    /// Returns the layer. `token` names a file that is read for each request: requests are rare,
    /// and the kubelet replaces the token at will.
    pub(super) fn new(url: String, token: Option<PathBuf>, status: StatusWriter) -> Self {
        Self { url, token, status }
    }

    fn authorize<B>(&self, request: &mut Request<B>) -> Result<(), BoxError> {
        let Some(path) = &self.token else { return Ok(()) };
        let token = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
        let mut value = HeaderValue::try_from(format!("Bearer {}", token.trim()))?;
        value.set_sensitive(true);
        request.headers_mut().insert(AUTHORIZATION, value);
        Ok(())
    }
}

impl<S> Layer<S> for Observe {
    type Service = Observed<S>;

    fn layer(&self, inner: S) -> Observed<S> {
        Observed { inner, observe: self.clone() }
    }
}

pub(super) struct Observed<S> {
    inner: S,
    observe: Observe,
}

impl<S, B, R> Service<Request<B>> for Observed<S>
where
    S: Service<Request<B>, Response = Response<R>, Error = BoxError>,
    S::Future: Send + 'static,
{
    type Response = Response<R>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<R>, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        if let Err(error) = self.observe.authorize(&mut request) {
            self.observe.status.trouble(API_SERVER, format!("no request can be made: {error}"));
            return Box::pin(async { Err(error) });
        }
        let subject = subject(request.uri().path());
        let answer = self.inner.call(request);
        let Observe { url, status, .. } = self.observe.clone();
        Box::pin(async move {
            let answer = answer.await;
            match &answer {
                Ok(response) => {
                    status.well(API_SERVER, &format!("{url} answers again"));
                    status.contact();
                    if response.status().is_success() {
                        status.well(subject, "served again");
                    }
                }
                Err(error) => {
                    status.trouble(API_SERVER, format!("{url} does not answer: {}", chain(&**error)));
                }
            }
            answer
        })
    }
}

/// Returns the kind of objects that a request is about, in the words of
/// [`super::watch::Kind::plural`].
fn subject(path: &str) -> &'static str {
    match path.rsplit('/').next() {
        Some("services") => "Services",
        Some("endpointslices") => "EndpointSlices",
        Some("nodes") => "Nodes",
        Some("servicecidrs") => "ServiceCIDRs",
        Some("leases") => "Leases",
        Some("events") => "Events",
        _ => "other requests",
    }
}

/// Formats an error with its causes: the outermost alone is just "client error (Connect)".
pub(super) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}
