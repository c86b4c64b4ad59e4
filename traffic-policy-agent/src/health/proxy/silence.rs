//! Silence of other nodes, as the proxy's health shows it.

use std::time::Instant;

use super::{EndpointLeftOut, ProxyHealth};

impl ProxyHealth {
    /// Sets the endpoints that the maps leave out because they are silent.
    pub fn set_endpoints_left_out(&self, endpoints: Vec<EndpointLeftOut>) {
        self.state().endpoints_left_out = endpoints;
    }

    /// Sets whether this node is cut off from all others, which no restart mends either; and the
    /// dead nodes that are left out: name, time since which, and what was asked without an answer.
    pub fn set_silence(&self, cut_off: bool, silent: Vec<(String, Instant, String)>) {
        let mut state = self.state();
        state.cut_off = cut_off;
        state.silent = silent;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::{super::tests::Probe, *};

    /// A balancer must not send to a node that reaches no endpoint of others; a restart mends
    /// nothing.
    #[tokio::test]
    async fn a_node_that_is_cut_off_is_alive_and_not_healthy() {
        let health = ProxyHealth::new(true, true);
        let probe = Probe::new(&health);
        health.set_node_eligible(true);
        health.synced();
        let silent = || vec![("far".to_owned(), Instant::now(), "ping".to_owned())];
        health.set_silence(false, silent());
        let (status, body) = probe.get("/healthz").await;
        assert_eq!((status, &body["leftOut"], body.get("cutOff")), (200, &serde_json::json!(["far"]), None));
        health.set_silence(true, Vec::new());
        assert_eq!(probe.statuses().await, (503, 200));
        let (_, body) = probe.get("/healthz").await;
        assert_eq!((&body["cutOff"], body.get("leftOut")), (&Value::from(true), None));
        health.set_silence(false, Vec::new());
        assert_eq!(probe.statuses().await, (200, 200));
    }
}
