//! Asks the API server for a sign of life while nothing comes from it by HTTP/1.1.
//!
//! A watch on which nothing happens looks like one whose server stands still. HTTP/2 has pings ([`super::connect`]); in their place
//! it is one small request that every role may make.

use std::time::Duration;

use hyper::Request;
use kube::Client;
use tokio::time::{Instant, sleep_until};
use tracing::debug;

use super::deadline::Line;

/// Silence before the question. With [`super::deadline::ANSWER`] behind it a loss is reported within 30 s.
const QUIET: Duration = Duration::from_secs(15);

/// Runs for ever. What comes of the question is reported where all requests are: in [`super::observe`].
pub(super) async fn run(client: Client, line: Line) {
    let mut asked = Instant::now();
    loop {
        let due = asked.max(line.last_heard()) + QUIET;
        if due > Instant::now() {
            sleep_until(due).await;
            continue;
        }
        asked = Instant::now();
        if line.pings() {
            continue;
        }
        let Ok(question) = Request::get("/version").body(Vec::new()) else { return };
        // Whatever the status is: somebody answers.
        if let Err(error @ (kube::Error::Service(_) | kube::Error::HyperError(_))) =
            client.request_text(question).await
        {
            debug!("no sign of life: {error}");
            line.give_up();
        }
    }
}
