//! The proxy on the nodes, and the settings by which its agents notice nodes that went without a
//! word.

/// A proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proxy {
    /// This project's agents.
    TrafficPolicy(Silence),
    /// kube-proxy: it knows no annotation of this project, has no drain, and forwards to a node
    /// that is gone until Kubernetes removes the endpoints.
    KubeProxy,
}

impl Proxy {
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::TrafficPolicy(_) => "traffic-policy",
            Self::KubeProxy => "kube-proxy",
        }
    }

    pub(crate) const fn is_kube_proxy(self) -> bool {
        matches!(self, Self::KubeProxy)
    }

    /// Returns the settings by which nodes notice each other's silence.
    pub(crate) const fn silence(self) -> Silence {
        match self {
            Self::TrafficPolicy(silence) => silence,
            Self::KubeProxy => Silence::OFF,
        }
    }
}

impl Default for Proxy {
    fn default() -> Self {
        Self::TrafficPolicy(Silence::default())
    }
}

/// The settings by which the agent of a node notices that another node is silent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Silence {
    /// The number of unanswered SYNs after which a node is suspected; 0: never.
    pub suspect_syns: u32,
    /// The largest part of the nodes with endpoints that is left out, in percent.
    pub max_left_out: u8,
    /// The number of TCP connections per second that each node makes to each other node with
    /// endpoints, besides those of the Service.
    pub other_tcp: u32,
}

impl Silence {
    /// Nodes do not notice each other's silence.
    pub const OFF: Self = Self { suspect_syns: 0, max_left_out: 50, other_tcp: 0 };

    /// Whether the number of unanswered SYNs raises a suspicion.
    pub(crate) const fn is_suspect(self, syns: u32) -> bool {
        self.suspect_syns > 0 && syns >= self.suspect_syns
    }
}

impl Default for Silence {
    fn default() -> Self {
        Self { suspect_syns: 3, ..Self::OFF }
    }
}
