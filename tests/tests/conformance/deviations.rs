//! Deliberate deviations from kube-proxy.
//!
//! All of them concern the address that an endpoint sees. The fate of a flow is the same, with two
//! exceptions: SCTP of pods and of processes of the node is left alone, as the kernel runs no
//! cgroup program in their calls; and node ports are also reached on loopback, in both families.

/// The origin of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A pod of this node. kube-proxy may count pods of other nodes too; here they are external,
    /// because their replies would not pass this node.
    Pod,
    /// A process of this node.
    Node,
    External,
}

/// The kind of a flow's destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum To {
    ClusterIp,
    NodePort,
    LoadBalancer,
    ExternalIp,
}

/// `externalTrafficPolicy` or `internalTrafficPolicy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    Cluster,
    Local,
}

/// Whether the endpoint sees an address of the node, if it does with kube-proxy (`masquerade`).
pub fn masquerade(
    masquerade: bool,
    origin: Origin,
    to: To,
    external: Policy,
    endpoint_is_here: bool,
) -> bool {
    match origin {
        // The reply of an endpoint on this node passes this node anyway, so the client's address
        // need not be hidden from it.
        Origin::External => masquerade && !endpoint_is_here,
        // The socket is connected to the endpoint itself: no packet ever carries the Service's
        // address.
        Origin::Pod | Origin::Node if to != To::ClusterIp && external == Policy::Cluster => false,
        Origin::Pod | Origin::Node => masquerade,
    }
}
