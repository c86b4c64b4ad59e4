//! `--notice aws`: interruption of a Spot instance of Amazon EC2, by IMDSv2.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use hyper::StatusCode;
use jiff::Timestamp;
use serde::Deserialize;
use tokio::time::Instant;
use traffic_policy_cluster::source::Leaving;

use super::{
    board::Reporter,
    metadata::{LIMIT, Metadata},
    poll::{self, Polled},
};

pub(super) const BASE: &str = "http://169.254.169.254";
const TOKEN: &str = "/latest/api/token";
const PATH: &str = "/latest/meta-data/spot/instance-action";
/// The interval that AWS advises.
const INTERVAL: Duration = Duration::from_secs(5);
/// The requested life of a token, which is the longest that there is, in seconds; and the age at
/// which another is requested.
const LIFE: &str = "21600";
const AGE: Duration = Duration::from_secs(5 * 3600);

/// The answer once an interruption is due.
#[derive(Deserialize)]
struct Action {
    action: String,
    time: Option<Timestamp>,
}

/// Asks forever.
pub(super) async fn run(base: String, reporter: Reporter) {
    poll::run(Aws { server: Metadata::new(&base), token: None }, reporter).await;
}

struct Aws {
    server: Metadata,
    /// The token, and when it was given.
    token: Option<(String, Instant)>,
}

impl Polled for Aws {
    const INTERVAL: Duration = INTERVAL;

    async fn request(&mut self) -> Result<Option<Leaving>> {
        ask(&self.server, &mut self.token).await
    }
}

async fn ask(server: &Metadata, token: &mut Option<(String, Instant)>) -> Result<Option<Leaving>> {
    let current = match token.take().filter(|(_, since)| since.elapsed() < AGE) {
        Some(current) => current,
        None => {
            let answer = server.put(TOKEN, &[("X-aws-ec2-metadata-token-ttl-seconds", LIFE)]).await?;
            (answer.ok(TOKEN)?.body.trim().to_owned(), Instant::now())
        }
    };
    let answer = server.get(PATH, &[("X-aws-ec2-metadata-token", &current.0)], LIMIT).await?;
    let leaving = match answer.status {
        // Nothing is due.
        StatusCode::NOT_FOUND => None,
        StatusCode::OK => {
            let Action { action, time } = serde_json::from_str(&answer.body).context(PATH)?;
            Some(Leaving { reason: format!("Spot interruption: {action}"), gone_by: time })
        }
        other => bail!("{PATH}: status {other}"),
    };
    // After an error another token is requested.
    *token = Some(current);
    Ok(leaving)
}
