//! A probe of the API server while nothing comes from it over HTTP/1.1.
//!
//! A watch on which nothing happens looks like one whose server hangs. HTTP/2 has pings
//! ([`super::connect`]); HTTP/1.1 uses one small request instead, which every role may make.

use std::time::Duration;

use hyper::Request;
use kube::Client;
use tokio::time::{Instant, sleep_until};
use tracing::debug;

use super::deadline::Line;

/// The silence before the probe. Together with [`super::deadline::ANSWER`], a loss is reported
/// within 30 s.
const QUIET: Duration = Duration::from_secs(15);

/// Runs forever. The outcome of the probe is reported in [`super::observe`], as for all requests.
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
        // Any status shows that the server is alive.
        if let Err(error @ (kube::Error::Service(_) | kube::Error::HyperError(_))) =
            client.request_text(question).await
        {
            debug!("no sign of life: {error}");
            line.give_up();
        }
    }
}
