//! `--node-condition`: a condition of the Node object that shows whether Services work on the node.

use std::time::Duration;

use k8s_openapi::{api::core::v1::Node, jiff::Timestamp};
use kube::{
    Api, Client,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::json;
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

use super::reason;

/// The condition's type.
const TYPE: &str = "ServiceProxyReady";
/// The interval at which the condition is written again as a sign of life.
const HEARTBEAT: Duration = Duration::from_secs(300);
/// The shortest and longest pause between attempts: the API server may be away.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];
/// The number of characters of a message. The API server takes 32 KiB, but a person reads less.
const MOST: usize = 1024;

/// The status of the agent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeCondition {
    /// The problem as text; empty if all is well.
    pub wrong: String,
}

pub type ConditionSender = watch::Sender<Option<NodeCondition>>;

pub(super) fn channel() -> (ConditionSender, watch::Receiver<Option<NodeCondition>>) {
    watch::channel(None)
}

/// Writes the condition when it changes, and as a sign of life. Never returns: the end of a task is
/// a failure.
pub(super) async fn run(
    client: Client,
    node_name: String,
    mut state: watch::Receiver<Option<NodeCondition>>,
) {
    let nodes: Api<Node> = Api::all(client);
    let mut pause = PAUSES[0];
    let mut said = String::new();
    // The state in the Node object: not known yet.
    let mut written: Option<bool> = None;
    loop {
        let now = state.borrow_and_update().clone();
        if let Some(now) = now {
            match write(&nodes, &node_name, &now, &mut written).await {
                Ok(()) => {
                    pause = PAUSES[0];
                    said.clear();
                }
                Err(error) => {
                    // Log each reason once.
                    let reason = reason::of(&error);
                    if reason != said {
                        tracing::warn!(
                            "the condition {TYPE} of Node {node_name} is not written, trying again: {reason} (its role needs the verb list \
                             on nodes and patch on nodes/status)"
                        );
                        said = reason;
                    }
                    sleep(pause).await;
                    pause = (pause * 2).min(PAUSES[1]);
                    continue;
                }
            }
        }
        // An error means that the source has stopped, and with it this task; otherwise something
        // has changed, or a sign of life is due.
        if let Ok(Err(_)) = timeout(HEARTBEAT, state.changed()).await {
            return std::future::pending().await;
        }
    }
}

async fn write(
    nodes: &Api<Node>,
    name: &str,
    state: &NodeCondition,
    written: &mut Option<bool>,
) -> Result<(), kube::Error> {
    let ready = state.wrong.is_empty();
    let before = match *written {
        Some(before) => Some(before),
        None => current(nodes, name).await?,
    };
    let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let message: String = if ready {
        "the maps of the packet path hold all that the cluster wants".to_owned()
    } else {
        state.wrong.chars().take(MOST).collect()
    };
    let mut condition = json!({
        "type": TYPE,
        "status": if ready { "True" } else { "False" },
        "reason": if ready { "InSync" } else { "NotInSync" },
        "message": message,
        "lastHeartbeatTime": now,
    });
    // Otherwise the transition time in the Node stays.
    if before != Some(ready) {
        condition["lastTransitionTime"] = now.into();
    }
    // Conditions are merged by type, so those of others stay.
    let patch = json!({"status": {"conditions": [condition]}});
    nodes.patch_status(name, &PatchParams::default(), &Patch::Strategic(patch)).await?;
    *written = Some(ready);
    Ok(())
}

/// Returns the status of the Node's condition. It uses a list, because some roles may list Nodes
/// but not get one.
async fn current(nodes: &Api<Node>, name: &str) -> Result<Option<bool>, kube::Error> {
    let list = nodes.list(&ListParams::default().fields(&format!("metadata.name={name}"))).await?;
    let status = list.items.into_iter().next().and_then(|node| node.status);
    let conditions = status.and_then(|status| status.conditions).unwrap_or_default();
    let own = conditions.into_iter().find(|condition| condition.type_ == TYPE);
    Ok(own.and_then(|condition| match condition.status.as_str() {
        "True" => Some(true),
        "False" => Some(false),
        _ => None,
    }))
}
