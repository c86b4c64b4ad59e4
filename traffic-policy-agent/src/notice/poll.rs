//! The loop of sources that have to be requested again and again.

use std::time::Duration;

use anyhow::Result;
use tokio::time::sleep;
use traffic_policy_cluster::source::Leaving;

use super::{board::Reporter, metadata::Pauses};

/// A source that answers whether this node is about to go.
pub(super) trait Polled {
    /// The pause after an answer; after an error it is that of [`Pauses`].
    const INTERVAL: Duration;

    /// Requests an answer.
    ///
    /// # Errors
    /// The server does not answer, or not as documented.
    fn request(&mut self) -> impl Future<Output = Result<Option<Leaving>>> + Send;
}

/// Requests forever, and reports each answer.
pub(super) async fn run<P: Polled>(mut source: P, reporter: Reporter) {
    let mut pauses = Pauses::default();
    loop {
        let pause = match source.request().await {
            Ok(leaving) => {
                pauses.succeeded();
                reporter.well();
                reporter.say(leaving);
                P::INTERVAL
            }
            Err(error) => {
                reporter.trouble(format!("{error:#}"));
                pauses.next()
            }
        };
        // Neither server notifies of a change.
        sleep(pause).await;
    }
}
