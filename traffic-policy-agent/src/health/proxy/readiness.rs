//! `/readyz`: whether a rollout may continue with the next node.

use hyper::StatusCode;
use serde::Serialize;

use super::{
    super::listener::{Answer, json},
    ProxyHealth, State,
};

impl ProxyHealth {
    /// Answers whether the maps hold the desired state, or will soon. The Node does not count: a
    /// rollout would wait for one that is drained. A client on this node also receives the
    /// obstacles by name.
    pub(super) fn readyz(&self, from_here: bool) -> Answer {
        let unready = self.unready(&self.state());
        let waiting_for = if unready.is_some() && from_here { self.report().waiting_for } else { Vec::new() };
        let status = if unready.is_none() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        let body = Readiness { ready: unready.is_none(), reason: unready, waiting_for };
        // The body has only strings and a flag, which always serialize to JSON.
        json(status, serde_json::to_string(&body).unwrap_or_default())
    }

    /// Returns the reason why a rollout has to wait; `None` if it need not.
    fn unready(&self, state: &State) -> Option<&'static str> {
        if state.updated.is_none() {
            return Some("the maps do not hold the first full sync yet");
        }
        if state.failure.is_some() {
            return Some("the last write of the maps failed, and is tried again");
        }
        if self.is_late(state) {
            return Some("a change has been waiting for more than a minute");
        }
        if state.detached.is_some() {
            return Some("programs are not attached, or are those of another layout version");
        }
        state.refused.is_some().then_some("the kernel refuses programs that some Services need")
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Readiness {
    ready: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    waiting_for: Vec<String>,
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::{
        super::tests::{Probe, pass},
        *,
    };

    /// A rollout depends on this: it must wait neither for the Node, which may be drained for long,
    /// nor for each write that fails.
    #[tokio::test]
    async fn ready_from_the_first_sync_on_whatever_the_node_is() {
        let health = ProxyHealth::new(true, true);
        let probe = Probe::new(&health);
        let reason = |body: &Value| body["reason"].as_str().unwrap().to_owned();
        let (status, body) = probe.get("/readyz").await;
        assert_eq!((status, body["ready"].as_bool()), (503, Some(false)));
        assert!(reason(&body).contains("first full sync"), "{body}");
        assert!(body["waitingFor"][0].as_str().unwrap().contains("has not started"), "{body}");

        health.synced();
        assert_eq!(probe.get("/readyz").await, (200, serde_json::json!({"ready": true})));
        assert_eq!(probe.statuses().await, (503, 200), "the Node is not eligible");

        health.explain("the map is full".to_owned());
        health.failed();
        let (status, body) = probe.get("/readyz").await;
        assert_eq!((status, reason(&body).contains("failed")), (503, true), "at once: {body}");
        let waiting_for = body["waitingFor"].as_array().unwrap();
        assert!(waiting_for.contains(&"writing the maps failed: the map is full".into()), "{body}");
        health.synced();
        health.set_detached(Some("tc of eth0 was taken off".to_owned()));
        let (status, body) = probe.get("/readyz").await;
        assert_eq!((status, reason(&body).contains("programs")), (503, true), "{body}");
        health.set_detached(None);
        health.set_refused(Some("no memory".to_owned()));
        let (status, body) = probe.get("/readyz").await;
        assert_eq!((status, reason(&body).contains("refuses programs")), (503, true), "{body}");
        let waiting_for = body["waitingFor"].as_array().unwrap();
        assert!(waiting_for.contains(&"SCTP is not served: no memory".into()), "{body}");
        assert_eq!(probe.statuses().await, (503, 200), "as before: the Node is not eligible");
        assert!(health.is_healthy(), "all other Services are served");
        health.set_refused(None);

        health.queued();
        assert_eq!(probe.get("/readyz").await.0, 200, "not late yet");
        pass(&health);
        let (status, body) = probe.get("/readyz").await;
        assert_eq!((status, reason(&body).contains("waiting")), (503, true), "{body}");
        health.synced();
        assert_eq!(probe.get("/readyz").await.0, 200);
    }
}
