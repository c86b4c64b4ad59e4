//! The names of proxies on the command line.

use clap::ValueEnum;

use crate::{Proxy, Silence};

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum NamedProxy {
    TrafficPolicy,
    KubeProxy,
}

impl NamedProxy {
    /// Returns the proxy; agents with the defaults of their flags.
    pub(super) fn with_defaults(self) -> Proxy {
        match self {
            Self::TrafficPolicy => Proxy::TrafficPolicy(Silence::default()),
            Self::KubeProxy => Proxy::KubeProxy,
        }
    }
}
