//! The two Leases of a node as objects.

use std::{net::IpAddr, time::Duration};

use k8s_openapi::{api::coordination::v1::Lease, jiff::Timestamp};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};

use super::DirectPart;
use crate::{
    model::Dispatch,
    source::convert::{
        DIRECT_ADDRESSES, DIRECT_CHOICE, DIRECT_DISPATCH, DIRECT_LABEL, DIRECT_MACS, DIRECT_OPENS,
        DIRECT_PROTOCOLS, DIRECT_REPLY, DIRECT_SENDS, DIRECT_TUNNEL, DIRECT_TUNNEL_SCTP, OPENED_PROTOCOLS,
    },
};

/// The reason for which a node opens no packets, for readers.
const WHY_NOT: &str = "traffic-policy.io/opens-not";
/// The beginnings of the names, before that of the node.
const OPENS: &str = "traffic-policy-opens-";
const RENEWED: &str = "traffic-policy-renewed-";
/// The field manager of both.
const MANAGER: &str = "traffic-policy";

/// Returns the name of the Lease that says whether a node opens packets.
pub(super) fn name(node: &str) -> String {
    format!("{OPENS}{node}")
}

/// Returns the name of the Lease that its agent renews.
pub(super) fn name_renewed(node: &str) -> String {
    format!("{RENEWED}{node}")
}

/// The Leases of a namespace. It uses lists, because the role may list but not get.
pub(super) struct Leases {
    api: Api<Lease>,
}

impl Leases {
    pub(super) fn new(client: Client, namespace: &str) -> Self {
        Self { api: Api::namespaced(client, namespace) }
    }

    pub(super) async fn find(&self, name: &str) -> Result<Option<Lease>, kube::Error> {
        Ok(self.api.list(&named(name)).await?.items.into_iter().next())
    }

    /// Says what part a node takes.
    pub(super) async fn tell(
        &self,
        node: &str,
        uid: Option<&str>,
        part: &DirectPart,
    ) -> Result<(), kube::Error> {
        let addresses: Vec<_> = part.addresses.iter().map(IpAddr::to_string).collect();
        let mut lease = object(&name(node), node);
        lease["metadata"]["labels"] = labels(part.opens());
        lease["metadata"]["annotations"] = json!({ DIRECT_ADDRESSES: addresses.join(",") });
        let opened = part.dispatch.opened().map(Dispatch::name);
        lease["metadata"]["annotations"][DIRECT_DISPATCH] = opened.join(",").into();
        lease["metadata"]["annotations"][DIRECT_PROTOCOLS] = OPENED_PROTOCOLS.into();
        let macs: Vec<_> =
            part.macs.iter().map(|mac| mac.map(|byte| format!("{byte:02x}")).join(":")).collect();
        lease["metadata"]["annotations"][DIRECT_MACS] = macs.join(",").into();
        lease["metadata"]["annotations"][DIRECT_CHOICE] = part.choice.as_str().into();
        let replies = if part.tunnels_sctp {
            format!("{DIRECT_TUNNEL},{DIRECT_TUNNEL_SCTP}")
        } else {
            DIRECT_TUNNEL.into()
        };
        lease["metadata"]["annotations"][DIRECT_REPLY] = replies.into();
        if let Some(why) = &part.why_not {
            lease["metadata"]["annotations"][WHY_NOT] = why.as_str().into();
        }
        if let Some(uid) = uid {
            lease["metadata"]["ownerReferences"] = owner(node, uid);
        }
        self.apply(&name(node), lease).await
    }

    /// Renews the Lease of a running agent. `lasting`: after which time without a renewal it counts
    /// no more.
    pub(super) async fn renew(
        &self,
        node: &str,
        uid: Option<&str>,
        lasting: Duration,
    ) -> Result<(), kube::Error> {
        let mut lease = object(&name_renewed(node), node);
        lease["spec"]["renewTime"] = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_string().into();
        lease["spec"]["leaseDurationSeconds"] = lasting.as_secs().max(1).into();
        if let Some(uid) = uid {
            lease["metadata"]["ownerReferences"] = owner(node, uid);
        }
        self.apply(&name_renewed(node), lease).await
    }

    /// Says of a node that it opens no packets any longer; those that it has sent itself are still
    /// opened. Returns whether it had opened some.
    pub(super) async fn stop_opening(&self, node: &str, why: &str) -> Result<bool, kube::Error> {
        let Some(found) = self.find(&name(node)).await? else { return Ok(false) };
        let metadata = found.metadata;
        let opens = metadata.labels.as_ref().and_then(|labels| labels.get(DIRECT_LABEL));
        if opens.is_none_or(|value| value == DIRECT_SENDS) {
            return Ok(false);
        }
        let mut lease = object(&name(node), node);
        lease["metadata"]["labels"] = labels(false);
        lease["metadata"]["annotations"] = json!({ WHY_NOT: why });
        for kept in [DIRECT_ADDRESSES, DIRECT_MACS] {
            if let Some(addresses) = metadata.annotations.as_ref().and_then(|all| all.get(kept)) {
                lease["metadata"]["annotations"][kept] = addresses.as_str().into();
            }
        }
        if let Some(owners) = &metadata.owner_references {
            lease["metadata"]["ownerReferences"] = json!(owners);
        }
        // The API server refuses if its agent has written since.
        lease["metadata"]["resourceVersion"] = json!(metadata.resource_version);
        match self.apply(&name(node), lease).await {
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
            done => done.map(|()| true),
        }
    }

    pub(super) async fn remove(&self, name: &str) -> Result<(), kube::Error> {
        match self.api.delete(name, &DeleteParams::default()).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            removed => removed.map(drop),
        }
    }

    /// Does what the role of an agent has to allow, without effect.
    pub(super) async fn try_out(&self) -> Result<(), kube::Error> {
        let name = name("check");
        self.find(&name).await?;
        let parameters = PatchParams { dry_run: true, ..PatchParams::apply(MANAGER).force() };
        let mut lease = object(&name, "check");
        lease["metadata"]["labels"] = labels(false);
        self.api.patch(&name, &parameters, &Patch::Apply(lease)).await?;
        Ok(())
    }

    async fn apply(&self, name: &str, lease: Value) -> Result<(), kube::Error> {
        let parameters = PatchParams::apply(MANAGER).force();
        self.api.patch(name, &parameters, &Patch::Apply(lease)).await.map(drop)
    }
}

fn named(name: &str) -> ListParams {
    ListParams::default().fields(&format!("metadata.name={name}"))
}

fn object(name: &str, node: &str) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": { "name": name },
        "spec": { "holderIdentity": node },
    })
}

fn labels(opens: bool) -> Value {
    json!({ DIRECT_LABEL: if opens { DIRECT_OPENS } else { DIRECT_SENDS } })
}

fn owner(node: &str, uid: &str) -> Value {
    json!([{"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}])
}
