//! News that this node is about to go, in the answers to load balancers.

use serde::Serialize;
use traffic_policy_cluster::source::Leaving;

use super::ProxyHealth;
use crate::notice::Board;

/// The news as `/healthz` shows it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Farewell {
    reason: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    gone_by: Option<String>,
}

impl From<Leaving> for Farewell {
    fn from(Leaving { reason, gone_by }: Leaving) -> Self {
        Self { reason, gone_by: gone_by.map(|time| time.to_string()) }
    }
}

impl ProxyHealth {
    /// Heeds the news on a board: while they say that this node is about to go, load balancers are
    /// told not to send here. The packet path goes on, so `/livez` and `/readyz` do not change.
    pub fn heed(&self, board: Board) {
        self.state().board = board;
    }

    /// Returns the news if this node is about to go.
    #[must_use]
    pub fn leaving(&self) -> Option<Leaving> {
        self.state().board.leaving()
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::Probe, *};

    #[tokio::test]
    async fn a_node_with_notice_says_so_at_once_and_is_alive() {
        let (health, board) = (ProxyHealth::new(true, true), Board::default());
        let probe = Probe::new(&health);
        health.heed(board.clone());
        health.set_node_eligible(true);
        health.synced();
        let (status, body) = probe.get("/healthz").await;
        assert_eq!((status, body.get("leaving")), (200, None));
        let source = board.reporter("gce");
        let gone_by = "2026-11-24T13:00:30Z".parse().ok();
        source.say(Some(Leaving { reason: "preempted".to_owned(), gone_by }));
        let (status, body) = probe.get("/healthz").await;
        assert_eq!((status, body["nodeEligible"].as_bool()), (503, Some(false)), "{body}");
        assert_eq!(body["healthy"], true, "the packet path goes on");
        let told = serde_json::json!({"reason": "gce: preempted", "goneBy": "2026-11-24T13:00:30Z"});
        assert_eq!(body["leaving"], told);
        assert!(health.is_healthy());
        let (status, body) = probe.get("/livez").await;
        assert_eq!((status, body.get("leaving")), (200, None));
        assert_eq!(probe.get("/readyz").await.0, 200, "a rollout need not wait");
        let report = health.report();
        assert!(report.leaving.as_deref().unwrap().contains("preempted"), "{report:?}");
        source.say(None);
        assert_eq!(probe.statuses().await, (200, 200));
        source.trouble("no answer".to_owned());
        assert_eq!(health.report().errors["--notice gce"], "no answer");
    }
}
