//! The client of the probes: GET requests and bare connections, each with a time limit, and a few
//! at a time. Answers are not trusted: their size and time are bounded, and redirects are not
//! followed.

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

/// The number of bytes read of a body; those of the agent and kube-proxy have a few hundred.
const BODY: usize = 16 << 10;
/// The largest size of headers, in bytes.
const HEADERS: usize = 16 << 10;
/// The pause before a probe whose answer differs is repeated: recent changes are in effect by then.
const PAUSE: Duration = Duration::from_secs(1);

/// Limits on simultaneous probes.
#[derive(Clone, Copy, Debug)]
pub(in crate::command::lb) struct Limits {
    /// The time limit for each answer.
    pub(in crate::command::lb) within: Duration,
    pub(in crate::command::lb) at_once: usize,
    /// The number of connections to node ports per second.
    pub(in crate::command::lb) traffic_rate: u32,
}

/// Sends all probes, and those whose answer differs once more: objects and nodes are not read at
/// the same moment.
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

/// Sends all probes once.
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
        // kube-proxy answers on any path of a health port; balancers request this one.
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

/// Sends one request. The error is the reason why the response is not valid.
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
        // If the connection ends without a response, its own error gives the reason better than the
        // sender's.
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
