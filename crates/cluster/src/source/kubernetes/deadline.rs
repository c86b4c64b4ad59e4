//! Deadlines of requests, and the time of the API server's last sign of life.
//!
//! A server that accepts a connection and sends nothing is as good as none, but never causes an
//! error. So each response has a deadline for its headers, and each body that is not a watch's has
//! one for each of its pieces and one for the whole. Watches, which may be silent for good reasons,
//! end when HTTP/2 pings get no answer; over HTTP/1.1, when [`super::probe`] gets none.

use std::{
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use futures::stream;
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    Request, Response, Version,
    body::{Body, Bytes, Frame},
};
use tokio::{
    sync::watch,
    time::{Instant, timeout, timeout_at},
};
use tower::{BoxError, Layer, Service};

/// The time limit for the headers of a response, and between two pieces of a body that is not a
/// watch's. An API server sends headers at once, even for a watch on which nothing happens.
pub(super) const ANSWER: Duration = Duration::from_secs(10);
/// The time limit for all of a body that is not a watch's, and for a list at the beginning of a
/// watch, so that trickling does not evade [`ANSWER`]. 100 MB, the size of all EndpointSlices of a
/// large cluster, take 8 s at 100 Mbit/s.
pub(super) const WHOLE: Duration = Duration::from_secs(120);

/// A body that never makes its reader wait forever.
pub(super) type Answer = UnsyncBoxBody<Bytes, BoxError>;

#[derive(Debug, thiserror::Error)]
pub(super) enum Silence {
    #[error("no answer within {} s", ANSWER.as_secs())]
    Headers,
    #[error("the answer stopped in the middle: nothing for {} s", ANSWER.as_secs())]
    Piece,
    #[error("the answer did not end within {} s", WHOLE.as_secs())]
    Whole,
}

/// The time of the API server's last sign of life, and the signal to abandon open watches. Cheap to
/// clone; all clones share one state.
#[derive(Clone, Debug)]
pub(super) struct Line {
    heard: Arc<Mutex<Instant>>,
    /// Incremented when open watches must end.
    given_up: watch::Sender<u64>,
    /// Whether the last response came over HTTP/2, which has pings of its own.
    pings: Arc<AtomicBool>,
}

impl Line {
    pub(super) fn new() -> Self {
        Self {
            heard: Arc::new(Mutex::new(Instant::now())),
            given_up: watch::Sender::new(0),
            pings: Arc::default(),
        }
    }

    fn heard(&self) {
        *self.heard.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Whether HTTP/2 itself monitors the connection.
    pub(super) fn pings(&self) -> bool {
        self.pings.load(Ordering::Relaxed)
    }

    pub(super) fn last_heard(&self) -> Instant {
        *self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the open watches: they resume on other connections from where they were.
    pub(super) fn give_up(&self) {
        self.given_up.send_modify(|times| *times += 1);
    }
}

/// A layer that puts deadlines on the responses of an inner service.
#[derive(Clone, Debug)]
pub(super) struct Deadlines(pub(super) Line);

impl<S> Layer<S> for Deadlines {
    type Service = Limited<S>;

    fn layer(&self, inner: S) -> Limited<S> {
        Limited { inner, line: self.0.clone() }
    }
}

pub(super) struct Limited<S> {
    inner: S,
    line: Line,
}

impl<S, B, R> Service<Request<B>> for Limited<S>
where
    S: Service<Request<B>, Response = Response<R>, Error = BoxError>,
    S::Future: Send + 'static,
    R: Body<Data = Bytes> + Send + Unpin + 'static,
    R::Error: Into<BoxError>,
{
    type Response = Response<Answer>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Answer>, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let is_watch =
            request.uri().query().is_some_and(|query| query.split('&').any(|pair| pair == "watch=true"));
        let answer = self.inner.call(request);
        let line = self.line.clone();
        Box::pin(async move {
            let response = timeout(ANSWER, answer).await.map_err(|_| Silence::Headers)??;
            line.heard();
            line.pings.store(response.version() == Version::HTTP_2, Ordering::Relaxed);
            let (parts, body) = response.into_parts();
            let body = if is_watch && parts.status.is_success() {
                until_given_up(body, line)
            } else {
                whole(body, &line).await?
            };
            Ok(Response::from_parts(parts, body))
        })
    }
}

/// Reads a whole body within the deadlines.
async fn whole<R>(mut body: R, line: &Line) -> Result<Answer, BoxError>
where
    R: Body<Data = Bytes> + Unpin,
    R::Error: Into<BoxError>,
{
    let end = Instant::now() + WHOLE;
    let mut bytes = Vec::new();
    loop {
        let piece = Instant::now() + ANSWER;
        let frame = timeout_at(piece.min(end), body.frame()).await;
        let late = |_| if piece < end { Silence::Piece } else { Silence::Whole };
        let Some(frame) = frame.map_err(late)? else { break };
        line.heard();
        if let Ok(data) = frame.map_err(Into::into)?.into_data() {
            bytes.extend_from_slice(&data);
        }
        if Instant::now() > end {
            return Err(Silence::Whole.into());
        }
    }
    Ok(Full::new(Bytes::from(bytes)).map_err(|never| match never {}).boxed_unsync())
}

/// Returns a body that may be silent as long as the server is alive. It ends when the server has
/// been given up, and the watch is requested again from where it was.
fn until_given_up<R>(body: R, line: Line) -> Answer
where
    R: Body<Data = Bytes> + Send + Unpin + 'static,
    R::Error: Into<BoxError>,
{
    let given_up = line.given_up.subscribe();
    let frames = stream::unfold((body, line, given_up), |(mut body, line, mut given_up)| async {
        let frame: Result<Frame<Bytes>, BoxError> = tokio::select! {
            frame = body.frame() => frame?.map_err(Into::into),
            Ok(()) = given_up.changed() => return None,
        };
        line.heard();
        Some((frame, (body, line, given_up)))
    });
    BodyExt::boxed_unsync(StreamBody::new(frames))
}
