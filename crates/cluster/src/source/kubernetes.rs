//! The Kubernetes API: watches of Services, EndpointSlices, ServiceCIDRs and the own Node.
//!
//! Needs no more than the built-in role `system:node-proxier` gives: list and watch these, create Events. ServiceCIDRs
//! it names only since they exist, so an agent may do without them.

mod access;
pub(super) mod condition;
mod connect;
mod deadline;
mod follow;
mod known_versions;
mod list;
mod observe;
mod one_by_one;
mod probe;
mod taint;
mod watch;

use std::{
    sync::{Arc, atomic::AtomicUsize},
    time::Duration,
};

use k8s_openapi::api::{
    core::v1::{Node, Service},
    discovery::v1::EndpointSlice,
    networking::v1::ServiceCIDR,
};
use kube::{Api, Client, client::ClientBuilder, runtime::watcher};
use tokio::{
    sync::{Notify, mpsc},
    task::JoinSet,
};

pub use self::{
    access::{Access, AccessError, SERVICE_ACCOUNT},
    follow::follow_cluster,
    list::{ListError, Listed, list_cluster},
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
    status::StatusWriter,
};

/// Follows the Kubernetes API.
#[derive(Clone, Debug)]
pub struct Kubernetes {
    pub access: Access,
    pub node_name: String,
    /// The key of a taint that is removed from the own Node once the maps are filled.
    pub startup_taint: Option<String>,
    /// The agent's status is written to a condition of its own Node.
    pub node_condition: bool,
    /// Lists whose history the API server has lost are asked for at some moment within this time: all nodes notice together.
    pub relist_within: Duration,
}

/// [`Kubernetes::relist_within`] of agents. 5,000 nodes then are 670 lists a second, of which each API server has its part.
const RELIST_WITHIN: Duration = Duration::from_secs(30);

impl Kubernetes {
    /// For the node of this name; it writes nothing to it.
    pub fn new(access: Access, node_name: &str) -> Self {
        Self {
            access,
            node_name: node_name.to_owned(),
            startup_taint: None,
            node_condition: false,
            relist_within: RELIST_WITHIN,
        }
    }

    /// Starts the watches. An API that does not answer is waited for, with one exception.
    ///
    /// # Errors
    ///
    /// If the credentials cannot be read; and in a cluster without an explicit address, if the API's cluster IP does
    /// not answer within 5 seconds: it may be this very agent that must make it answer.
    pub async fn start(self) -> Result<Source, AccessError> {
        let (sender, updates) = mpsc::channel(QUEUE);
        let (writer, status) = StatusWriter::new();
        let mut tasks = JoinSet::new();
        let (client, known) = lasting_client(&self.access, &writer, &mut tasks).await?;

        let lists = Arc::new(AtomicUsize::new(4));
        let (events, poster) = events::channel(client.clone(), self.node_name.clone());
        tasks.spawn(poster);
        let filled = Arc::new(Notify::new());
        if let Some(key) = self.startup_taint {
            tasks.spawn(taint::run(client.clone(), self.node_name.clone(), key, Arc::clone(&filled)));
        }
        let standing = self.node_condition.then(|| {
            let (sender, receiver) = condition::channel();
            tasks.spawn(condition::run(client.clone(), self.node_name.clone(), receiver));
            sender
        });
        let sink = watch::Sink {
            sender,
            status: writer,
            events: events.clone(),
            lists,
            relist_within: self.relist_within,
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
        Ok(Source { updates, status, events, filled, standing, tasks })
    }
}

/// The client with the versions that its watches know. The tasks that look after its credentials and its connections
/// are put into `tasks`.
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

/// A client, and where new credentials for it are left.
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
