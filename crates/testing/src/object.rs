//! Kubernetes objects for tests: small builders, written as the YAML that users write.

mod addresses;
pub mod lease;
mod manifests;
pub mod node;
mod service;
mod slice;

pub use self::addresses::{cluster_ip, vip};
pub use self::manifests::Manifests;
pub use self::service::{Policy, Port, Service};
pub use self::slice::Backend;
