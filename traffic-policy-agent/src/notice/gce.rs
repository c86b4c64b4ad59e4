//! `--notice gce`: preemption of a Spot or preemptible instance of Google Compute Engine.

use std::time::Duration;

use anyhow::{Result, bail};
use jiff::{SignedDuration, Timestamp};
use tokio::time::{Instant, sleep, sleep_until};
use traffic_policy_cluster::source::Leaving;

use super::{
    board::Reporter,
    metadata::{Metadata, Pauses},
};

/// The address of metadata.google.internal: it works while no name does.
pub(super) const BASE: &str = "http://169.254.169.254";
const PATH: &str = "/computeMetadata/v1/instance/preempted";
/// The time after which the server is to answer even without a change, in seconds.
const HOLD: u64 = 60;
/// The time limit of such a request.
const LIMIT: Duration = Duration::from_secs(HOLD + 10);
/// The shortest interval between requests, should the server not hold them.
const INTERVAL: Duration = Duration::from_secs(1);
/// The time from the news until the instance is stopped.
const SPAN: SignedDuration = SignedDuration::from_secs(30);

/// Asks forever.
pub(super) async fn run(base: String, reporter: Reporter) {
    let server = Metadata::new(&base);
    let mut pauses = Pauses::default();
    // With the ETag of the last answer, only a later change is waited for.
    let mut known: Option<String> = None;
    let mut since = None;
    loop {
        let begun = Instant::now();
        match ask(&server, known.as_deref()).await {
            Ok((preempted, etag)) => {
                known = etag;
                pauses.succeeded();
                reporter.well();
                since = preempted.then(|| since.unwrap_or_else(Timestamp::now));
                reporter.say(since.map(|since| Leaving {
                    reason: "the instance is being preempted".to_owned(),
                    gone_by: since.checked_add(SPAN).ok(),
                }));
                sleep_until(begun + INTERVAL).await;
            }
            Err(error) => {
                reporter.trouble(format!("{error:#}"));
                sleep(pauses.next()).await;
            }
        }
    }
}

/// Returns whether the instance is being preempted, and the answer's ETag. Without `known` it
/// answers at once.
async fn ask(server: &Metadata, known: Option<&str>) -> Result<(bool, Option<String>)> {
    let path = match known {
        None => PATH.to_owned(),
        Some(etag) => format!("{PATH}?wait_for_change=true&timeout_sec={HOLD}&last_etag={etag}"),
    };
    let answer = server.get(&path, &[("Metadata-Flavor", "Google")], LIMIT).await?.ok(PATH)?;
    let etag = answer.headers.get("etag").and_then(|etag| etag.to_str().ok()).map(str::to_owned);
    match answer.body.trim() {
        "TRUE" => Ok((true, etag)),
        "FALSE" => Ok((false, etag)),
        other => bail!("{PATH}: {other:?} is neither TRUE nor FALSE: is this the metadata server of GCE?"),
    }
}
