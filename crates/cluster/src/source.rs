//! Sources of Services, EndpointSlices, Nodes, ServiceCIDRs and Leases of nodes that open packets:
//! the Kubernetes API or a folder of manifests.
//!
//! Both start as a task that sends [`Batch`]es; the run loop applies them to its
//! [`Index`](crate::model::Index) and writes the result. A source never reports an object as
//! deleted because it cannot see it: while the API is away or the folder is broken, it sends
//! nothing.

mod batch;
mod chance;
mod convert;
mod events;
mod kubernetes;
mod manifest;
mod node_addresses;
mod stamp;
mod status;

pub use self::{
    batch::{Batch, Change, Source, Update},
    events::{EventRecorder, ObjectEvent, Subject},
    kubernetes::{
        Access, AccessError, Announcement, DirectNews, DirectPart, DirectTold, Kubernetes, Leaving,
        ListError, Listed, Opening, SERVICE_ACCOUNT, WholeCluster, WithdrawError, Withdrawal,
        follow_cluster as watch_cluster, list_cluster, try_opening,
    },
    manifest::{Manifests, Mistakes, follow_cluster as watch_folder, read_cluster},
    node_addresses::{Heartbeat, NodeAddresses},
    status::{Stale, Status, StatusReader},
};
