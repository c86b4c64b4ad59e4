//! The asking: GET requests and bare connections, with an end for each, and few at a time. Answers are not trusted: what is
//! read of them is bounded in size and in time, and redirects are not followed.

use std::{
    io::{self, ErrorKind},
    net::SocketAddr,
    time::Duration,
};

use futures::{StreamExt as _, stream};
use http_body_util::{BodyExt as _, Empty, LengthLimitError, Limited};
use hyper::{
    Request,
    body::Bytes,
    client::conn::http1,
    header::{CONNECTION, HOST, USER_AGENT},
};
use hyper_util::rt::TokioIo;
use tokio::{
    net::TcpStream,
    sync::Mutex,
    time::{Instant, Interval, MissedTickBehavior, interval, sleep, timeout_at},
};

use crate::{
    Question,
    probe::{Asking, Heard, Http, Probed},
};

/// Bytes that are read of a body; the agent's and kube-proxy's have some hundred.
const BODY: usize = 16 << 10;
/// Bytes that headers may have.
const HEADERS: usize = 16 << 10;
/// Before a question is asked again whose answer differs: what changed just now is written by then.
const PAUSE: Duration = Duration::from_secs(1);

/// Limits on simultaneous questions.
#[derive(Clone, Copy, Debug)]
pub(in crate::command::lb) struct Limits {
    /// For each answer.
    pub(in crate::command::lb) within: Duration,
    pub(in crate::command::lb) at_once: usize,
    /// Connections to node ports in a second.
    pub(in crate::command::lb) traffic_rate: u32,
}

/// Asks all, and those once more whose answer differs: objects and nodes are not of the same moment.
pub(super) async fn twice(
    askings: Vec<Asking>,
    limits: Limits,
    mut progress: impl FnMut(usize, usize),
) -> Probed {
    let first = Probed::new(ask(askings, limits, &mut progress).await);
    if first.differences() == 0 {
        return first;
    }
    sleep(PAUSE).await;
    let (again, known) = first.ask_again();
    let second = ask(again, limits, &mut progress).await;
    Probed::twice(known, second)
}

/// Asks all once.
pub(in crate::command::lb) async fn ask(
    askings: Vec<Asking>,
    limits: Limits,
    mut progress: impl FnMut(usize, usize),
) -> Vec<(Asking, Heard, Duration)> {
    let count = askings.len();
    let mut ticks = interval(Duration::from_secs(1) / limits.traffic_rate.max(1));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let pace = Mutex::new(ticks);
    let pace = &pace;
    let mut answers = stream::iter(askings)
        .map(|asking| async move {
            let (heard, took) = one(&asking, limits.within, pace).await;
            (asking, heard, took)
        })
        .buffered(limits.at_once.max(1));
    let mut all = Vec::with_capacity(count);
    while let Some(answer) = answers.next().await {
        all.push(answer);
        progress(all.len(), count);
    }
    all
}

async fn one(asking: &Asking, within: Duration, pace: &Mutex<Interval>) -> (Heard, Duration) {
    let Some(to) = asking.to else { return (Heard::NoAddress, Duration::ZERO) };
    let path = match asking.question {
        Question::TrafficPort(_) => {
            pace.lock().await.tick().await;
            None
        }
        // kube-proxy answers any path of a health port; balancers ask this one.
        _ => Some("/healthz"),
    };
    let begun = Instant::now();
    let end = begun + within;
    let heard = match timeout_at(end, TcpStream::connect(to)).await {
        Err(_) => Heard::Silence,
        Ok(Err(error)) => failed(&error),
        Ok(Ok(stream)) => match path {
            None => Heard::Connected,
            Some(path) => match timeout_at(end, exchange(stream, to, path, asking.question)).await {
                Err(_) => Heard::Hangs,
                Ok(Ok(http)) => Heard::Http(http),
                Ok(Err(why)) => Heard::Garbled(why),
            },
        },
    };
    (heard, begun.elapsed())
}

fn failed(error: &io::Error) -> Heard {
    match error.kind() {
        ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset => Heard::Refused,
        ErrorKind::TimedOut => Heard::Silence,
        ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => Heard::Unreachable,
        _ => Heard::NotAsked(error.to_string()),
    }
}

/// One request. An error says why what came is no answer.
async fn exchange(
    stream: TcpStream,
    to: SocketAddr,
    path: &str,
    question: Question,
) -> Result<Http, &'static str> {
    let (mut sender, connection) = http1::Builder::new()
        .max_buf_size(HEADERS)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(|_| "closed")?;
    let request = Request::get(path)
        .header(HOST, to.to_string())
        .header(USER_AGENT, concat!("kubectl-traffic_policy/", env!("CARGO_PKG_VERSION")))
        .header(CONNECTION, "close")
        .body(Empty::<Bytes>::new())
        .map_err(|_| "not asked")?;
    let exchange = async {
        let response = sender.send_request(request).await.map_err(|error| why(&error))?;
        let status = response.status().as_u16();
        let weight = response.headers().get("x-load-balancing-endpoint-weight").cloned();
        let body = Limited::new(response.into_body(), BODY).collect().await.map_err(|error| {
            if error.is::<LengthLimitError>() { "a body that is too long" } else { "a body that is cut off" }
        })?;
        Ok(Http::read(
            question,
            status,
            weight.as_ref().map(hyper::http::HeaderValue::as_bytes),
            &body.to_bytes(),
        ))
    };
    tokio::select! {
        answer = exchange => answer,
        // Without an answer it has ended, which the sender does not say as well.
        Err(error) = connection => Err(why(&error)),
    }
}

fn why(error: &hyper::Error) -> &'static str {
    if error.is_parse_too_large() {
        "headers that are too long"
    } else if error.is_parse() {
        "other bytes"
    } else {
        "closed without an answer"
    }
}

#[cfg(test)]
mod tests;
