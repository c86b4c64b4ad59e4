//! The part of Kubernetes objects that the model reads: a few fields, checked and parsed, so that
//! thousands of them are cheap to keep and two versions of one object compare equal unless
//! something relevant changed.

use std::{
    net::IpAddr,
    time::{Duration, SystemTime},
};

use ipnet::IpNet;

use super::{Algorithm, Dispatch, Forwarding, Protocol, ServiceName, Weights};

/// `spec.type` of a Service that is proxied (never `ExternalName`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ServiceType {
    #[default]
    ClusterIp,
    NodePort,
    LoadBalancer,
}

/// `externalTrafficPolicy` or `internalTrafficPolicy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    Cluster,
    Local,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    pub name: ServiceName,
    /// `metadata.creationTimestamp` in seconds since 1970; `None` counts as newer than any other.
    pub created: Option<i64>,
    pub service_type: ServiceType,
    /// Whether another proxy serves it (`service.kubernetes.io/service-proxy-name`): only its
    /// cluster IPs matter.
    pub foreign: bool,
    /// `spec.clusterIPs`.
    pub cluster_ips: Vec<IpAddr>,
    /// Whether it is proxied in IPv4; as a rule, whether it has a cluster IP of the family. The
    /// next field is the same for IPv6.
    pub ipv4: bool,
    pub ipv6: bool,
    pub external_ips: Vec<IpAddr>,
    /// `status.loadBalancer.ingress[].ip`, without those whose `ipMode` is `Proxy`.
    pub load_balancer_ips: Vec<IpAddr>,
    pub ports: Vec<Port>,
    pub external_policy: Policy,
    pub internal_policy: Policy,
    /// `spec.loadBalancerSourceRanges`; empty: every source.
    pub source_ranges: Vec<IpNet>,
    /// The time-out of `sessionAffinity: ClientIP`, if set.
    pub affinity: Option<Duration>,
    /// `spec.healthCheckNodePort`; 0: none.
    pub health_check_node_port: u16,
    /// The port of the annotation `traffic-policy.io/health-check-node-port`; 0: none.
    pub health_annotation: u16,
    /// Whether it has the annotation `traffic-policy.io/external-fallback: cluster`.
    pub external_fallback: bool,
    /// The annotation `traffic-policy.io/algorithm`.
    pub algorithm: Option<Algorithm>,
    /// The annotation `traffic-policy.io/weight`.
    pub weights: Weights,
    pub drain: Option<Duration>,
    /// The annotation `traffic-policy.io/forwarding`.
    pub forwarding: Option<Forwarding>,
    /// Fields that identify the load balancer, if they were requested.
    pub signs: Option<Box<Signs>>,
    /// Unusable parts of this object, one sentence each, with the object and the field.
    pub problems: Vec<String>,
}

impl Service {
    /// Returns a Service without ports and addresses.
    #[must_use]
    pub fn unserved(name: ServiceName) -> Self {
        Self {
            name,
            created: None,
            service_type: ServiceType::ClusterIp,
            foreign: false,
            cluster_ips: Vec::new(),
            ipv4: false,
            ipv6: false,
            external_ips: Vec::new(),
            load_balancer_ips: Vec::new(),
            ports: Vec::new(),
            external_policy: Policy::Cluster,
            internal_policy: Policy::Cluster,
            source_ranges: Vec::new(),
            affinity: None,
            health_check_node_port: 0,
            health_annotation: 0,
            external_fallback: false,
            algorithm: None,
            weights: Weights::default(),
            drain: None,
            forwarding: None,
            signs: None,
            problems: Vec::new(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// The port's name; empty for an unnamed port.
    pub name: String,
    pub protocol: Protocol,
    pub port: u16,
    /// `nodePort`; 0: none.
    pub node_port: u16,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointSlice {
    pub name: ServiceName,
    /// The Service that the label `kubernetes.io/service-name` names, in the slice's namespace.
    pub service: String,
    /// Whether `addressType` is `IPv6`; otherwise it is `IPv4`.
    pub ipv6: bool,
    pub ports: Vec<SlicePort>,
    pub endpoints: Vec<SliceEndpoint>,
    /// Unusable parts of this object, one sentence each, with the object and the field.
    pub problems: Vec<String>,
    pub last_change: LastChange,
}

/// The time of the change that an EndpointSlice describes:
/// `endpoints.kubernetes.io/last-change-trigger-time`. It is for metrics and does not influence
/// where packets go, so all values compare equal.
#[derive(Clone, Copy, Debug, Default)]
pub struct LastChange(pub Option<SystemTime>);

impl PartialEq for LastChange {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for LastChange {}

impl EndpointSlice {
    /// Returns the Service to which these endpoints belong.
    #[must_use]
    pub fn service_name(&self) -> ServiceName {
        ServiceName { namespace: self.name.namespace.clone(), name: self.service.clone() }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlicePort {
    /// The port's name; empty for an unnamed port.
    pub name: String,
    pub protocol: Protocol,
    pub port: u16,
}

/// An endpoint of a slice, of the slice's family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceEndpoint {
    pub address: IpAddr,
    pub node_name: Option<Box<str>>,
    pub ready: bool,
    pub serving: bool,
    pub terminating: bool,
    /// `hints.forZones[].name`
    pub for_zones: Vec<Box<str>>,
    /// `hints.forNodes[].name`
    pub for_nodes: Vec<Box<str>>,
    /// `targetRef.name`, if it was requested.
    pub pod: Option<Box<str>>,
}

impl SliceEndpoint {
    /// Returns an endpoint that is ready, or else terminating, without hints.
    #[must_use]
    pub fn new(address: IpAddr, node: Option<&str>, ready: bool) -> Self {
        Self {
            address,
            node_name: node.map(Into::into),
            ready,
            serving: ready,
            terminating: !ready,
            for_zones: Vec::new(),
            for_nodes: Vec::new(),
            pod: None,
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    pub name: String,
    /// The first address of each family, internal before external ones.
    pub addresses: Vec<IpAddr>,
    /// All internal and external addresses, in the order of the object.
    pub all_addresses: Vec<IpAddr>,
    /// `spec.podCIDRs`, the ranges of its pods' addresses.
    pub pod_cidrs: Vec<IpNet>,
    /// The label `topology.kubernetes.io/zone`.
    pub zone: Option<String>,
    /// Whether it is being deleted, or has the taint `ToBeDeletedByClusterAutoscaler`.
    pub leaving: bool,
    /// Facts for balancers and the scheduler, if they were requested.
    pub standing: NodeFacts,
    /// Unusable parts of this object, one sentence each, with the object and the field.
    pub problems: Vec<String>,
}

/// Facts about a Node that balancers and the scheduler depend on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// Whether `metadata.deletionTimestamp` is set.
    pub deleting: bool,
    /// Whether it has the taint `ToBeDeletedByClusterAutoscaler`.
    pub to_be_deleted: bool,
    /// Whether it has the label `node.kubernetes.io/exclude-from-external-load-balancers`.
    pub excluded: bool,
    /// `spec.unschedulable`
    pub unschedulable: bool,
    /// The condition `Ready`.
    pub readiness: Readiness,
    /// Whether the cloud may take the machine away at any time, according to the labels that clouds
    /// set.
    pub preemptible: bool,
    /// The prefix of `spec.providerID`: `gce`, `aws`, `azure`, `kind`.
    pub provider: Option<Box<str>>,
    /// `status.addresses` of type `InternalIP`, in the order of the object.
    pub internal_ips: Vec<IpAddr>,
    /// `status.addresses` of type `ExternalIP`, in the order of the object.
    pub external_ips: Vec<IpAddr>,
}

/// The condition `Ready` of a Node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Readiness {
    /// True; also assumed where a manifest has no conditions.
    #[default]
    Ready,
    NotReady,
    /// Unknown: the control plane no longer hears from its kubelet.
    Unknown,
}

/// Fields of a Service that identify the load balancer in front of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Signs {
    /// `spec.loadBalancerClass`
    pub class: Option<String>,
    /// Annotations that balancers' controllers read or write.
    pub annotations: Vec<(String, String)>,
    /// `status.loadBalancer.ingress[].hostname`
    pub hostnames: Vec<String>,
    /// Whether an `ingress[].ipMode` is `Proxy`: the balancer terminates connections and connects
    /// to the node port.
    pub proxy_mode: bool,
    /// `spec.selector`
    pub selector: Vec<(String, String)>,
}

/// A range from which the API server allocates cluster IPs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServiceCidr {
    pub name: String,
    /// `spec.cidrs`
    pub cidrs: Vec<IpNet>,
    /// Unusable parts of this object, one sentence each, with the object and the field.
    pub problems: Vec<String>,
}

/// A node that has announced that it is about to go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeavingNode {
    /// The name of the Lease by which it announces that.
    pub name: ServiceName,
    /// The name of the node, which is that of its endpoints' `nodeName`.
    pub node: String,
}

/// A node that takes part in direct forwarding: it sends packets, and its agent may open those of
/// others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectNode {
    /// The name of the Lease by which it says so.
    pub name: ServiceName,
    /// The name of the node, which is that of its endpoints' `nodeName`.
    pub node: String,
    /// Whether it opens packets that other nodes forward to it.
    pub opens: bool,
    /// The kinds that it opens, the preferred one first. Empty only if it opens nothing and another
    /// node has said so, whose agent found this one's silent; what the node itself writes names
    /// them, also while it opens nothing for new flows.
    pub dispatches: Vec<Dispatch>,
    /// Whether it opens packets of SCTP, too.
    pub sctp: bool,
    /// Whether it sends replies back through the node in front, if that asks for it.
    pub tunnels: bool,
    /// Whether its replies of SCTP may, too.
    pub tunnels_sctp: bool,
    /// The addresses that such packets of its own have as their source.
    pub addresses: Vec<IpAddr>,
    /// The MAC addresses of its devices that have programs.
    pub macs: Vec<[u8; 6]>,
    /// The node's settings that decide which endpoint it finds: see
    /// [`NodeInput::choice`][super::NodeInput::choice].
    pub choice: Option<String>,
    /// Whether it has words that are not known here, which a later version of its agent has
    /// written.
    pub says_more: bool,
    /// The UID of the Node object to which the Lease belongs, and with which it is removed.
    pub owner: Option<Box<str>>,
}

impl DirectNode {
    /// Returns the `--forwarding` and `--algorithm` of its agent, with which [`Self::choice`]
    /// begins; `None`: it does not say.
    #[must_use]
    pub fn settings(&self) -> Option<(Forwarding, Algorithm)> {
        let mut words = self.choice.as_deref()?.split(' ');
        let forwarding = Forwarding::parse(words.next()?)?;
        let algorithm = words.next()?;
        Some((forwarding, Algorithm::ALL.into_iter().find(|known| known.name() == algorithm)?))
    }

    /// Whether its packets, sent and opened, are of this family, too: it has an address of it.
    pub(super) fn has_family(&self, ipv6: bool) -> bool {
        self.addresses.iter().any(|address| address.is_ipv6() == ipv6)
    }
}
