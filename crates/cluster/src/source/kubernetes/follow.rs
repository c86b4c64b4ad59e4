//! Watches of all Nodes, Services and EndpointSlices of a cluster, and of the Leases of direct
//! forwarding, for judging it as a whole: nothing is written, and no Event is posted.

use std::{
    sync::{Arc, atomic::AtomicUsize},
    time::Duration,
};

use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{Node, Service},
    discovery::v1::EndpointSlice,
};
use kube::{Api, runtime::watcher};
use tokio::{
    sync::{mpsc, watch::Sender},
    task::JoinSet,
};

use super::{Access, AccessError, lasting_client, opening, watch};
use crate::source::{
    batch::{QUEUE, Source, Update},
    convert::{
        self, Author,
        detail::{self, Detail},
    },
    events::EventRecorder,
    node_addresses::NodeAddresses,
    status::StatusWriter,
};

/// Starts the watches, with all that the judgement of a cluster needs.
pub async fn follow_cluster(access: &Access) -> Result<Source, AccessError> {
    let (sender, updates) = mpsc::channel(QUEUE);
    let (writer, status) = StatusWriter::new();
    let mut tasks = JoinSet::new();
    let (client, known) = lasting_client(access, &writer, &mut tasks).await?;
    let (events, lists) = (EventRecorder::nowhere(), Arc::new(AtomicUsize::new(4)));
    let sink = watch::Sink {
        sender,
        status: writer,
        events: events.clone(),
        lists,
        relist_within: Duration::ZERO,
        own_node: Sender::default(),
        known,
    };
    let labelled = |selector| watcher::Config::default().labels(selector);
    tasks.spawn(watch::run(
        Api::all(client.clone()),
        watcher::Config::default(),
        watch::Kind {
            plural: "Nodes",
            without: None,
            convert: |node: &Node| detail::node(node, Detail::Cluster).map(Some),
            update: Update::Node,
        },
        sink.clone(),
    ));
    tasks.spawn(watch::run(
        Api::all(client.clone()),
        labelled(convert::SERVICE_SELECTOR),
        watch::Kind {
            plural: "Services",
            without: None,
            convert: |service: &Service| detail::service(service, Author::ApiServer, Detail::Cluster),
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
            convert: |slice: &EndpointSlice| detail::endpoint_slice(slice, Detail::Cluster),
            update: Update::EndpointSlice,
        },
        sink.clone(),
    ));
    tasks.spawn(watch::run(
        Api::all(client),
        labelled(opening::SELECTOR),
        watch::Kind {
            plural: "Leases of direct forwarding",
            without: Some("all nodes are taken to open packets that are forwarded directly"),
            convert: |lease: &Lease| convert::direct(lease),
            update: Update::Direct,
        },
        sink,
    ));
    let node_addresses = NodeAddresses::in_index();
    Ok(Source { updates, status, events, filled: Arc::default(), condition: None, node_addresses, tasks })
}
