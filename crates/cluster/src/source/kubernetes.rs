//! The Kubernetes API: watches of Services, EndpointSlices, ServiceCIDRs and this node's Node.
//!
//! The built-in role `system:node-proxier` suffices: list and watch these, create Events. The role
//! includes ServiceCIDRs only in versions that have them, so an agent can run without them. Leases
//! by which nodes announce that they are about to go, or that they open packets of others, need a
//! role of their own.

mod access;
mod announcement;
pub(super) mod condition;
mod connect;
mod deadline;
mod follow;
mod known_versions;
mod list;
mod observe;
mod one_by_one;
mod opening;
mod probe;
mod reason;
mod taint;
mod watch;

use std::{
    sync::{Arc, atomic::AtomicUsize},
    time::Duration,
};

use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{Node, Service},
    discovery::v1::EndpointSlice,
    networking::v1::ServiceCIDR,
};
use kube::{Api, Client, client::ClientBuilder, runtime::watcher};
use tokio::{
    sync::{Notify, mpsc, watch::Sender},
    task::JoinSet,
};

pub use self::{
    access::{Access, AccessError, SERVICE_ACCOUNT},
    announcement::{Announcement, Leaving},
    follow::follow_cluster,
    list::{ListError, Listed, WholeCluster, list_cluster},
    opening::{DirectNews, DirectPart, DirectTold, Opening, WithdrawError, Withdrawal, try_opening},
};
use self::{
    connect::{Next, Renewed},
    deadline::{Deadlines, Line},
    known_versions::KnownVersions,
    observe::Observe,
};
use super::{
    batch::{QUEUE, Source, Update},
    convert, events,
    node_addresses::NodeAddresses,
    status::StatusWriter,
};

/// A source that follows the Kubernetes API.
#[derive(Clone, Debug)]
pub struct Kubernetes {
    pub access: Access,
    pub node_name: String,
    /// The key of a taint that is removed from this node's Node once the maps are filled.
    pub startup_taint: Option<String>,
    /// Whether the agent's status is written to a condition of its Node.
    pub node_condition: bool,
    /// The announcement to the other nodes when this one is about to go, and theirs to this one;
    /// `None`: neither.
    pub announcement: Option<Announcement>,
    /// The Leases by which nodes take part in direct forwarding; `None`: this one takes none.
    pub opening: Option<Opening>,
    /// The time within which lists are requested again, each at a random moment, after the API
    /// server has lost its history: all nodes notice at once.
    pub relist_within: Duration,
}

/// [`Kubernetes::relist_within`] of agents. With 5,000 nodes this makes 670 lists a second, shared
/// by all API servers.
const RELIST_WITHIN: Duration = Duration::from_secs(30);

impl Kubernetes {
    /// Returns a source for the node of this name; it writes nothing to the Node.
    pub fn new(access: Access, node_name: &str) -> Self {
        Self {
            access,
            node_name: node_name.to_owned(),
            startup_taint: None,
            node_condition: false,
            announcement: None,
            opening: None,
            relist_within: RELIST_WITHIN,
        }
    }

    /// Starts the watches. It waits for an API that does not answer, with one exception.
    ///
    /// # Errors
    ///
    /// The credentials cannot be read; or, in a cluster without an explicit address, the API's
    /// cluster IP does not answer within 5 seconds: this very agent may be the one that has to make
    /// it answer.
    pub async fn start(self) -> Result<Source, AccessError> {
        let (sender, updates) = mpsc::channel(QUEUE);
        let (writer, status) = StatusWriter::new();
        let mut tasks = JoinSet::new();
        let (client, known) = lasting_client(&self.access, &writer, &mut tasks).await?;

        let more = [self.announcement.is_some(), self.opening.is_some()].map(usize::from);
        let lists = Arc::new(AtomicUsize::new(4 + more.iter().sum::<usize>()));
        let node_addresses = NodeAddresses::of_cluster(client.clone());
        let (events, poster) = events::channel(client.clone(), self.node_name.clone());
        tasks.spawn(poster);
        let filled = Arc::new(Notify::new());
        if let Some(key) = self.startup_taint {
            tasks.spawn(taint::run(client.clone(), self.node_name.clone(), key, Arc::clone(&filled)));
        }
        let condition = self.node_condition.then(|| {
            let (sender, receiver) = condition::channel();
            tasks.spawn(condition::run(client.clone(), self.node_name.clone(), receiver));
            sender
        });
        let own_node = Sender::<watch::OwnNode>::default();
        let sink = watch::Sink {
            sender,
            status: writer,
            events: events.clone(),
            lists,
            relist_within: self.relist_within,
            own_node: own_node.clone(),
            known,
        };
        let labelled = |selector| watcher::Config::default().labels(selector);
        tasks.spawn(watch::run(
            Api::all(client.clone()),
            labelled(convert::SERVICE_SELECTOR),
            watch::Kind {
                plural: "Services",
                without: None,
                convert: |s: &Service| convert::service(s, convert::Author::ApiServer),
                update: Update::Service,
            },
            sink.clone(),
        ));
        tasks.spawn(watch::run(
            Api::all(client.clone()),
            labelled(convert::SLICE_SELECTOR),
            watch::Kind {
                plural: "EndpointSlices",
                without: None,
                convert: |s: &EndpointSlice| convert::endpoint_slice(s),
                update: Update::EndpointSlice,
            },
            sink.clone(),
        ));
        tasks.spawn(watch::run(
            Api::all(client.clone()),
            watcher::Config::default().fields(&format!("metadata.name={}", self.node_name)),
            watch::Kind {
                plural: "Nodes",
                without: None,
                convert: |node: &Node| convert::node(node).map(Some),
                update: Update::Node,
            },
            sink.clone(),
        ));
        if let Some(announcement) = self.announcement {
            tasks.spawn(watch::run(
                Api::namespaced(client.clone(), &announcement.namespace),
                labelled(announcement::SELECTOR),
                watch::Kind {
                    plural: "Leases",
                    without: Some("nodes that are about to go are not known (--announce-leaving)"),
                    convert: |lease: &Lease| convert::leaving(lease).map(Some),
                    update: Update::Leaving,
                },
                sink.clone(),
            ));
            tasks.spawn(announcement::run(client.clone(), self.node_name.clone(), announcement));
        }
        if let Some(opening) = self.opening {
            tasks.spawn(watch::run(
                Api::namespaced(client.clone(), &opening.namespace),
                labelled(opening::SELECTOR),
                watch::Kind {
                    plural: "Leases of direct forwarding",
                    without: Some("no node is known to open packets, and none are forwarded directly (--announce-opening)"),
                    convert: |lease: &Lease| convert::direct(lease),
                    update: Update::Direct,
                },
                sink.clone(),
            ));
            let own_node = own_node.subscribe();
            tasks.spawn(opening::run(client.clone(), self.node_name.clone(), own_node, opening));
        }
        tasks.spawn(watch::run(
            Api::all(client),
            watcher::Config::default(),
            watch::Kind {
                plural: "ServiceCIDRs",
                without: Some("only --service-cidr says which cluster IPs are nobody's"),
                convert: |object: &ServiceCIDR| convert::service_cidr(object).map(Some),
                update: Update::ServiceCidr,
            },
            sink,
        ));
        Ok(Source { updates, status, events, filled, condition, node_addresses, tasks })
    }
}

/// Returns the client with the versions that its watches know. The tasks that follow its
/// credentials and its connections are added to `tasks`.
async fn lasting_client(
    access: &Access,
    status: &StatusWriter,
    tasks: &mut JoinSet<()>,
) -> Result<(Client, KnownVersions), AccessError> {
    let line = Line::new();
    let known = KnownVersions::default();
    let (client, next) = client(access, &line, status, &known).await?;
    tasks.spawn(probe::run(client.clone(), line));
    if matches!(access, Access::Kubeconfig(_)) {
        tasks.spawn(connect::follow(access.clone(), next, status.clone()));
    }
    Ok((client, known))
}

/// Returns a client, and the handle by which it receives new credentials.
async fn client(
    access: &Access,
    line: &Line,
    status: &StatusWriter,
    known: &KnownVersions,
) -> Result<(Client, Next), AccessError> {
    let config = access.config().await?;
    let (url, namespace) = (config.cluster_url.to_string(), config.default_namespace.clone());
    let (connections, next) = Renewed::new(connect::connections(config)?);
    let client = ClientBuilder::new(connections, namespace)
        .with_layer(&Deadlines(line.clone()))
        .with_layer(known)
        .with_layer(&Observe::new(url, access.token(), status.clone()))
        .build();
    Ok((client, next))
}
