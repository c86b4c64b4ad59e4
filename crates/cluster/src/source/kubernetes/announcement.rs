//! `--announce-leaving`: a Lease by which a node that is about to go tells the others.

use std::{fs, time::Duration};

use k8s_openapi::{
    api::{coordination::v1::Lease, core::v1::Node},
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};

use super::reason;

/// The selector of all such Leases.
pub(super) const SELECTOR: &str = "traffic-policy.io/leaving=true";
const LABEL: &str = "traffic-policy.io/leaving";
const REASON: &str = "traffic-policy.io/leaving-reason";
const GONE_BY: &str = "traffic-policy.io/leaving-gone-by";
const BOOT_ID: &str = "traffic-policy.io/leaving-boot-id";
/// The beginning of a Lease's name, before that of the node.
const PREFIX: &str = "traffic-policy-leaving-";
/// The field manager of the Lease.
const MANAGER: &str = "traffic-policy";
/// The shortest and longest pause between attempts. A node that goes has few seconds to say so.
const PAUSES: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(5)];
/// The time after the start for which a Lease of this same boot is kept without news: an agent that
/// was restarted while its node leaves has not asked its sources yet.
const KEPT: Duration = Duration::from_secs(60);
const BOOT_ID_FILE: &str = "/proc/sys/kernel/random/boot_id";

/// News that this node is about to go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaving {
    pub reason: String,
    /// The time by which it is gone, if that is known.
    pub gone_by: Option<Timestamp>,
}

/// The place of announcements, and the channels of this node's own one.
#[derive(Clone, Debug)]
pub struct Announcement {
    pub namespace: String,
    /// The news to announce; `None`: this node stays.
    pub news: watch::Receiver<Option<Leaving>>,
    /// Raised while the API server holds the announcement.
    pub told: watch::Sender<bool>,
}

/// The object as far as this node knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Written {
    /// Not known: there may be one of an earlier agent.
    Unknown,
    /// Left by an agent of this same boot.
    Earlier,
    None,
    Own(Leaving),
}

/// Writes and removes the Lease. Never returns: the end of a task is a failure.
pub(super) async fn run(client: Client, node_name: String, announcement: Announcement) {
    let Announcement { namespace, mut news, told } = announcement;
    let boot_id = fs::read_to_string(BOOT_ID_FILE).unwrap_or_default().trim().to_owned();
    let name = format!("{PREFIX}{node_name}");
    let mut task = Task {
        leases: Api::namespaced(client.clone(), &namespace),
        client,
        node_name,
        name,
        boot_id,
        uid: None,
    };
    let kept_until = Instant::now() + KEPT;
    let mut written = Written::Unknown;
    let mut pause = PAUSES[0];
    let mut said = String::new();
    loop {
        let wanted = news.borrow_and_update().clone();
        let looks_only = wanted.is_none() && written == Written::Unknown;
        let step = task.step(wanted, &mut written, kept_until);
        let outcome = if looks_only {
            // News that come meanwhile do not wait for the answer.
            tokio::select! {
                outcome = step => outcome,
                () = changed(&mut news) => continue,
            }
        } else {
            step.await
        };
        match outcome {
            Ok(()) => {
                told.send_replace(matches!(written, Written::Own(_)));
                pause = PAUSES[0];
                said.clear();
                tokio::select! {
                    () = changed(&mut news) => {}
                    () = sleep_until(kept_until), if written == Written::Earlier => {}
                }
            }
            Err(error) => {
                // Log each reason once.
                let reason = reason::of(&error);
                if reason != said {
                    tracing::warn!(
                        "the Lease {namespace}/{}, by which other nodes learn that this one is about to go, is not up to date, \
                         trying again: {reason} (its role needs the verbs list, watch, create, patch and delete on leases there)",
                        task.name
                    );
                    said = reason;
                }
                tokio::select! {
                    () = changed(&mut news) => {}
                    () = sleep(pause) => {}
                }
                pause = (pause * 2).min(PAUSES[1]);
            }
        }
    }
}

async fn changed(news: &mut watch::Receiver<Option<Leaving>>) {
    // The senders are gone when the agent stops, and this task with it.
    if news.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

struct Task {
    leases: Api<Lease>,
    client: Client,
    node_name: String,
    /// The name of the Lease.
    name: String,
    boot_id: String,
    /// The UID of this node's Node: with it, the Lease goes when the Node goes.
    uid: Option<String>,
}

impl Task {
    /// Brings the Lease up to date.
    async fn step(
        &mut self,
        wanted: Option<Leaving>,
        written: &mut Written,
        kept_until: Instant,
    ) -> Result<(), kube::Error> {
        if let Some(wanted) = wanted {
            if *written != Written::Own(wanted.clone()) {
                let lease = self.lease(&wanted);
                let parameters = PatchParams::apply(MANAGER).force();
                self.leases.patch(&self.name, &parameters, &Patch::Apply(lease)).await?;
                tracing::info!("the other nodes are told that this one is about to go: {}", wanted.reason);
                *written = Written::Own(wanted);
            }
            return Ok(());
        }
        if *written == Written::Unknown {
            *written = self.find().await?;
        }
        let removed = match written {
            Written::None | Written::Unknown => return Ok(()),
            Written::Earlier if Instant::now() < kept_until => return Ok(()),
            Written::Earlier => "no source of news confirmed it",
            Written::Own(_) => "this node stays",
        };
        self.remove(removed).await?;
        *written = Written::None;
        Ok(())
    }

    /// Finds a Lease of an earlier agent, and removes it if the node has been started anew since.
    /// It uses lists, because the role may list but not get.
    async fn find(&mut self) -> Result<Written, kube::Error> {
        // Asked in advance: when the node goes, each request counts. Without it the Lease has to be
        // removed by hand if the node never comes back.
        let nodes: Api<Node> = Api::all(self.client.clone());
        let named = |name: &str| ListParams::default().fields(&format!("metadata.name={name}"));
        let node = nodes.list(&named(&self.node_name)).await?.items.into_iter().next();
        self.uid = node.and_then(|node| node.metadata.uid);
        let Some(lease) = self.leases.list(&named(&self.name)).await?.items.into_iter().next() else {
            return Ok(Written::None);
        };
        let boot_id = lease.metadata.annotations.and_then(|mut annotations| annotations.remove(BOOT_ID));
        if boot_id.as_deref() == Some(&self.boot_id) {
            return Ok(Written::Earlier);
        }
        self.remove("the node has been started anew since").await?;
        Ok(Written::None)
    }

    async fn remove(&self, why: &str) -> Result<(), kube::Error> {
        match self.leases.delete(&self.name, &DeleteParams::default()).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => return Err(error),
        }
        tracing::info!("the announcement that this node is about to go is removed: {why}");
        Ok(())
    }

    fn lease(&self, leaving: &Leaving) -> Value {
        let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_string();
        let mut lease = json!({
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": self.name,
                "labels": { LABEL: "true" },
                "annotations": { REASON: leaving.reason, BOOT_ID: self.boot_id },
            },
            "spec": { "holderIdentity": self.node_name, "acquireTime": now, "renewTime": now },
        });
        if let Some(gone_by) = &leaving.gone_by {
            lease["metadata"]["annotations"][GONE_BY] = gone_by.to_string().into();
        }
        if let Some(uid) = &self.uid {
            let owner = json!({"apiVersion": "v1", "kind": "Node", "name": self.node_name, "uid": uid});
            lease["metadata"]["ownerReferences"] = json!([owner]);
        }
        lease
    }
}
