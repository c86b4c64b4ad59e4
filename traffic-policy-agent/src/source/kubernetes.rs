//! The Kubernetes API: watches of Services, EndpointSlices, ServiceCIDRs and the own Node.
//!
//! Needs no more than the built-in role `system:node-proxier` gives: list and watch these, create Events. ServiceCIDRs
//! it names only since they exist, so an agent may do without them.

mod access;
mod observe;
mod watch;

use std::sync::{Arc, atomic::AtomicUsize};

use k8s_openapi::api::{
    core::v1::{Node, Service},
    discovery::v1::EndpointSlice,
    networking::v1::ServiceCIDR,
};
use kube::{Api, runtime::watcher};
use tokio::{sync::mpsc, task::JoinSet};

pub use self::access::{Access, AccessError, SERVICE_ACCOUNT};
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
}

impl Kubernetes {
    /// Starts the watches. An API that does not answer is waited for, with one exception.
    ///
    /// # Errors
    ///
    /// If the credentials cannot be read; and in a cluster without an explicit address, if the API's cluster IP does
    /// not answer within 5 seconds: it may be this very agent that must make it answer.
    pub async fn start(self) -> Result<Source, AccessError> {
        let (sender, updates) = mpsc::channel(QUEUE);
        let (writer, status) = StatusWriter::new();
        let client = self.access.client(&writer).await?;
        let mut tasks = JoinSet::new();

        let lists = Arc::new(AtomicUsize::new(4));
        let (events, poster) = events::channel(client.clone(), self.node_name.clone());
        tasks.spawn(poster);
        let sink = watch::Sink { sender, status: writer, events: events.clone(), lists };
        let labelled = watcher::Config::default().labels(convert::LABEL_SELECTOR);
        tasks.spawn(watch::run(
            Api::all(client.clone()),
            labelled.clone(),
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
            labelled,
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
        Ok(Source { updates, status, events, tasks })
    }
}
