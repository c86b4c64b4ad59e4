//! The packet path as any process can inspect it through its pins, whether or not an agent runs.
//!
//! Maps are opened for reading only, with one exception: a [`Listener`] registers in a word of
//! `tp_config`, and empties `tp_event_limit` first.

mod counters;
mod counts;
mod flows;
mod heartbeat;
mod links;
mod listener;
mod maps;
mod nodes;
mod owners;
mod pinned;
mod services;

pub use self::{
    counters::counters,
    counts::{Count, Counts, ServiceCount, service_count_reader},
    flows::{Flow, FlowKind, FlowState, Traffic},
    heartbeat::{Heartbeat, Presence},
    links::{Link, LinkHook, device_name},
    listener::{Event, Listener},
    maps::PinnedMap,
    nodes::{DeadNode, Nodes, node_macs},
    owners::{FormerOwner, FormerOwners},
    pinned::Pinned,
    services::{
        Choice, FrontendView, Phase, ServicePort, external_policy, falls_back, frontend_kind, service_key,
        service_names,
    },
};
pub use crate::dataplane::sync::former::Former as FormerTables;
