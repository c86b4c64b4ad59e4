//! The desired state of the maps, in the terms of Kubernetes. Pure: no kube types, no aya types, no
//! input or output.
//!
//! A source fills an [`Index`] with [`object`]s; [`Index::update`] keeps a [`Desired`] state up to
//! date with them.

#![forbid(unsafe_code)]

pub mod address;
mod allocation;
mod capacity;
mod conflicts;
mod context;
mod desired;
mod direct_nodes;
mod dispatch;
mod drain;
mod duration;
mod everywhere;
mod excess;
mod forwarding;
mod health_ports;
mod identity;
mod index;
mod limits;
pub mod maglev;
mod node_numbers;
pub mod object;
mod reach;
mod render;
mod service_port;
mod shares;
mod slice_ports;
mod source_ranges;
mod topology;
mod weights;

pub use capacity::Limits;
pub use context::NodeInput;
pub use desired::{
    Desired, Endpoint, FALLBACK_ANNOTATION, Frontend, FrontendKind, HealthCheck, OTHER_PROTOCOLS,
    ServicePort, Warning,
};
pub use direct_nodes::{DirectTarget, DirectTargets};
pub use dispatch::{Dispatch, DispatchChoice, Passing, Way, Ways};
pub use drain::{DEFAULT_DRAIN, HeldPolicy, drain_until};
pub use duration::parse_duration;
pub use everywhere::{Everywhere, ListId, Place};
pub use excess::Excess;
pub use forwarding::{FORWARDING_ANNOTATION, Forwarding};
pub use health_ports::{HEALTH_PORT_ANNOTATION, HealthPortRules, health_port};
pub use identity::{Protocol, ServiceName, ServicePortKey};
pub use index::{Changes, Index, Indexed};
pub use maglev::{ALGORITHM_ANNOTATION, Algorithm};
pub use node_numbers::{LAST as LAST_NODE_NUMBER, NodeNumbers};
pub use object::Policy;
pub use reach::{HealthReach, Reach};
pub use render::render;
pub use topology::Silent;
pub use weights::{WEIGHT_ANNOTATION, Weights};
