//! `--remove-startup-taint`: a taint that keeps pods off a node until its Services work.

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::{Node, Taint};
use kube::{
    Api, Client,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::json;
use tokio::{sync::Notify, time::sleep};

use super::reason;

/// The shortest and longest pause between attempts: another controller may be updating the Node.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// Waits until the maps are filled, and removes the taint from this node's Node, once. Never
/// returns: the end of a task is a failure.
pub(super) async fn run(client: Client, node_name: String, key: String, filled: Arc<Notify>) {
    filled.notified().await;
    let nodes: Api<Node> = Api::all(client);
    let mut pause = PAUSES[0];
    let mut said = String::new();
    loop {
        match remove(&nodes, &node_name, &key).await {
            Ok(true) => tracing::info!("the start-up taint {key} is removed from Node {node_name}"),
            Ok(false) => tracing::info!("Node {node_name} has no start-up taint {key}"),
            Err(error) => {
                // Log each reason once.
                let reason = reason::of(&error);
                if reason != said {
                    tracing::warn!(
                        "the start-up taint {key} is not removed from Node {node_name}, trying again: {reason} (its role needs the \
                         verbs list and patch on nodes)"
                    );
                    said = reason;
                }
                sleep(pause).await;
                pause = (pause * 2).min(PAUSES[1]);
                continue;
            }
        }
        return std::future::pending().await;
    }
}

/// Removes the taint. Returns whether the Node had it. It uses a list, because some roles may list
/// Nodes but not get one.
async fn remove(nodes: &Api<Node>, name: &str, key: &str) -> Result<bool, kube::Error> {
    let list = nodes.list(&ListParams::default().fields(&format!("metadata.name={name}"))).await?;
    let Some(node) = list.items.into_iter().next() else { return Ok(false) };
    let taints: Vec<Taint> = node.spec.and_then(|spec| spec.taints).unwrap_or_default();
    let left: Vec<&Taint> = taints.iter().filter(|taint| taint.key != key).collect();
    if left.len() == taints.len() {
        return Ok(false);
    }
    // The list is replaced as a whole, so the patch must fail if the Node has changed meanwhile.
    let patch =
        json!({"metadata": {"resourceVersion": node.metadata.resource_version}, "spec": {"taints": left}});
    nodes.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await?;
    Ok(true)
}
