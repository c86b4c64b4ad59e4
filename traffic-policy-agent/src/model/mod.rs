//! What the maps should hold, in the terms of Kubernetes. Pure: no kube types, no aya types, no input or output.

mod desired;

pub use desired::{
    Desired, Endpoint, Frontend, FrontendKind, HealthCheck, Policy, Protocol, ServiceName, ServicePort,
    ServicePortKey,
};
