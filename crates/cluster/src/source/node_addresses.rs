//! Addresses and heartbeats of other nodes by their names, which the sources do not follow: a
//! cluster of 5,000 nodes would send each heartbeat of each of them to all others.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client, api::ListParams};
use tokio::time::timeout;

use super::convert;

/// The time limit for a look-up: who asks is in a hurry.
const PATIENCE: Duration = Duration::from_secs(1);
/// The age up to which a known address is not looked up again, and a failure is not tried again.
const KNOWN: Duration = Duration::from_secs(600);
const FAILED: Duration = Duration::from_secs(10);
/// The number of nodes from which on old ones are forgotten.
const MOST: usize = 1024;

/// The addresses of nodes. Cheap to clone; all clones share what is known. Nothing is looked up
/// before it is asked for.
#[derive(Clone)]
pub struct NodeAddresses {
    nodes: Option<Api<Node>>,
    known: Arc<Mutex<HashMap<String, Known>>>,
}

/// A Node object's word on its kubelet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    /// Whether its condition `Ready` is true.
    pub ready: bool,
    /// The condition's `lastHeartbeatTime` (RFC 3339). The kubelet writes it every five minutes,
    /// or at `nodeStatusReportFrequency`, while nothing else of its status changes.
    pub at: String,
}

#[derive(Clone, Debug, Default)]
struct Known {
    addresses: Vec<IpAddr>,
    /// The time until which it is not looked up again.
    until: Option<Instant>,
}

impl NodeAddresses {
    /// Returns the addresses of a source that delivers all Nodes to the index.
    pub(super) fn in_index() -> Self {
        Self { nodes: None, known: Arc::default() }
    }

    pub(super) fn of_cluster(client: Client) -> Self {
        Self { nodes: Some(Api::all(client)), known: Arc::default() }
    }

    /// Returns the internal and external addresses of a Node; none if they are unknown, and the
    /// last known ones if the API server does not answer within a second.
    pub async fn of(&self, node: &str) -> Vec<IpAddr> {
        let Some(nodes) = &self.nodes else { return Vec::new() };
        let known = self.known().get(node).cloned().unwrap_or_default();
        if known.until.is_some_and(|until| Instant::now() < until) {
            return known.addresses;
        }
        let looked = match timeout(PATIENCE, look_up(nodes, node)).await {
            Ok(Ok(node)) => Ok(node.and_then(|node| Some(convert::node(&node).ok()?.all_addresses))),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("no answer within {} s", PATIENCE.as_secs())),
        };
        let (addresses, age) = match looked {
            Ok(addresses) => (addresses.unwrap_or_default(), KNOWN),
            Err(error) => {
                tracing::debug!(node, "the addresses of the node are not known: {error}");
                (known.addresses, FAILED)
            }
        };
        let until = Some(Instant::now() + age);
        let mut all = self.known();
        if all.len() >= MOST {
            all.retain(|_, known| known.until.is_some_and(|until| Instant::now() < until));
        }
        all.insert(node.to_owned(), Known { addresses: addresses.clone(), until });
        addresses
    }

    /// Returns the heartbeat of a Node as it is now; `None` if the source has no heartbeats, or the
    /// API server does not answer within a second.
    pub async fn heartbeat(&self, node: &str) -> Option<Heartbeat> {
        let node = timeout(PATIENCE, look_up(self.nodes.as_ref()?, node)).await.ok()?.ok()??;
        let ready = node.status?.conditions?.into_iter().find(|condition| condition.type_ == "Ready")?;
        let at = serde_json::to_value(ready.last_heartbeat_time?).ok()?;
        Some(Heartbeat { ready: ready.status == "True", at: at.as_str()?.to_owned() })
    }

    /// Returns the last known addresses of a Node, without looking it up.
    #[must_use]
    pub fn known_of(&self, node: &str) -> Vec<IpAddr> {
        self.known().get(node).map(|known| known.addresses.clone()).unwrap_or_default()
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, Known>> {
        // A panic leaves whole entries.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Looks up a Node by a list, which the role `system:node-proxier` allows. Any version will do, so
/// the API server takes it from its cache: all nodes may ask for the same one at once.
async fn look_up(nodes: &Api<Node>, name: &str) -> Result<Option<Node>, kube::Error> {
    let parameters = ListParams::default().fields(&format!("metadata.name={name}")).match_any();
    let list = nodes.list(&parameters).await?;
    Ok(list.items.into_iter().next())
}

impl std::fmt::Debug for NodeAddresses {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeAddresses").field("known", &self.known).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use http_body_util::Full;
    use hyper::{Request, Response, body::Bytes};
    use kube::client::Body;
    use tower::service_fn;

    use super::*;

    const LIST: &str = r#"{"kind": "NodeList", "apiVersion": "v1", "metadata": {}, "items": [{"metadata": {"name": "far"},
        "status": {"addresses": [{"type": "Hostname", "address": "far"}, {"type": "InternalIP", "address": "192.0.2.7"},
        {"type": "InternalIP", "address": "2001:db8::7"}], "conditions": [{"type": "Ready", "status": "True",
        "lastHeartbeatTime": "2026-01-02T03:04:05Z"}]}}]}"#;

    fn addresses(status: u16, asked: &Arc<AtomicUsize>) -> NodeAddresses {
        let asked = Arc::clone(asked);
        let service = service_fn(move |request: Request<Body>| {
            asked.fetch_add(1, Ordering::Relaxed);
            let query = request.uri().query().unwrap_or_default().to_owned();
            assert!(
                query.contains("fieldSelector=metadata.name%3Dfar") && query.contains("resourceVersion=0"),
                "{query}"
            );
            let text = if status == 200 { LIST } else { "{}" };
            let response = Response::builder().status(status).body(Full::new(Bytes::from(text))).unwrap();
            async move { Ok::<_, Infallible>(response) }
        });
        NodeAddresses::of_cluster(Client::new(service, "default"))
    }

    #[tokio::test]
    async fn a_node_is_looked_up_once() {
        let asked = Arc::default();
        let addresses = addresses(200, &asked);
        assert!(addresses.known_of("far").is_empty());
        assert_eq!(asked.load(Ordering::Relaxed), 0, "not before it is needed");
        for _ in 0..3 {
            let expected = ["192.0.2.7", "2001:db8::7"].map(|address| address.parse::<IpAddr>().unwrap());
            assert_eq!(addresses.of("far").await, expected);
        }
        assert_eq!(addresses.known_of("far").len(), 2);
        assert_eq!(asked.load(Ordering::Relaxed), 1);
    }

    /// A look-up of addresses is kept for minutes, and a heartbeat in it would be old.
    #[tokio::test]
    async fn a_heartbeat_is_read_anew_each_time() {
        let asked = Arc::default();
        let of = addresses(200, &asked);
        let expected = Heartbeat { ready: true, at: "2026-01-02T03:04:05Z".to_owned() };
        for _ in 0..2 {
            assert_eq!(of.heartbeat("far").await.as_ref(), Some(&expected));
        }
        assert_eq!(asked.load(Ordering::Relaxed), 2);
        assert_eq!(addresses(403, &asked).heartbeat("far").await, None);
        assert_eq!(NodeAddresses::in_index().heartbeat("far").await, None);
    }

    #[tokio::test]
    async fn a_refusal_is_not_tried_again_at_once() {
        let asked = Arc::default();
        let addresses = addresses(403, &asked);
        for _ in 0..3 {
            assert_eq!(addresses.of("far").await, [""; 0].map(|_| IpAddr::from([0; 4])));
        }
        assert_eq!(asked.load(Ordering::Relaxed), 1);
    }
}
