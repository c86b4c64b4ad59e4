//! The cause of an answer that does not follow from the objects.

use serde::Serialize;

/// The most likely cause of a difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    /// No proxy runs on the node.
    DeadAgent,
    /// A proxy runs there, and nothing listens on this port.
    NothingListens,
    /// Packets are dropped in transit.
    Firewall,
    /// No host has the address.
    WrongAddress,
    /// The Node has no address of this type.
    NoAddress,
    /// A connection is accepted, but not answered.
    Hangs,
    /// The agent hears no other node, and takes its own for cut off.
    CutOff,
    /// The agent has news that its node is about to go, of which these objects say nothing.
    Leaving,
    /// The proxy itself reports that it does not keep up.
    UnhealthyProxy,
    /// The proxy works with other objects than these.
    StaleProxy,
    /// The port belongs to another Service there.
    OtherService,
    /// Something answers that is neither kube-proxy nor this project's agent.
    OtherProxy,
    /// The kubelet is silent, but the node is not.
    KubeletOnly,
    /// This machine could not send the probe.
    NotAsked,
}

impl Cause {
    pub const ALL: [Self; 14] = [
        Self::DeadAgent,
        Self::NothingListens,
        Self::Firewall,
        Self::WrongAddress,
        Self::NoAddress,
        Self::Hangs,
        Self::CutOff,
        Self::Leaving,
        Self::UnhealthyProxy,
        Self::StaleProxy,
        Self::OtherService,
        Self::OtherProxy,
        Self::KubeletOnly,
        Self::NotAsked,
    ];

    /// Returns a name for programs.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::DeadAgent => "dead-agent",
            Self::NothingListens => "nothing-listens",
            Self::Firewall => "firewall",
            Self::WrongAddress => "wrong-address",
            Self::NoAddress => "no-address",
            Self::Hangs => "hangs",
            Self::CutOff => "cut-off",
            Self::Leaving => "leaving",
            Self::UnhealthyProxy => "unhealthy-proxy",
            Self::StaleProxy => "stale-proxy",
            Self::OtherService => "other-service",
            Self::OtherProxy => "other-proxy",
            Self::KubeletOnly => "kubelet-only",
            Self::NotAsked => "not-asked",
        }
    }

    /// Returns the remedy.
    pub(super) const fn fix(self) -> &'static str {
        match self {
            Self::DeadAgent => {
                "start the agent (or kube-proxy) there: `kubectl get pods -A -o wide --field-selector spec.nodeName=NODE`, and its log"
            }
            Self::NothingListens => {
                "see the log of the agent there for a port that could not be opened, and whether --node-port-addresses leaves this address out"
            }
            Self::Firewall => {
                "let this port of the nodes through, from the balancer's and from this machine's address (security group, firewall of the cloud, nftables of the node)"
            }
            Self::WrongAddress => {
                "ask from where the nodes' addresses are routed, or ask their other addresses by --node-address"
            }
            Self::NoAddress => "see status.addresses of the Node; --node-address asks those of another type",
            Self::Hangs => {
                "see whether the process there has come to a stop, or a proxy on the way takes connections for it"
            }
            Self::CutOff => {
                "see why the node reaches no other: its network card, the switch, the firewall between the nodes; it says 200 again once another node answers it"
            }
            Self::Leaving => {
                "let it: new connections go to other nodes; `traffic-policy-agent status` on the node has the reason and the time, and --announce-leaving there tells the other nodes"
            }
            Self::UnhealthyProxy => {
                "see what it waits for: `traffic-policy-agent status` on the node, or the log of kube-proxy"
            }
            Self::StaleProxy => {
                "compare `traffic-policy-agent services` on the node with these objects; if they are a copy, take a new one, and if they are not, see whether the proxy reaches the API server"
            }
            Self::OtherService => {
                "see which Service has this healthCheckNodePort now, and whether the address belongs to a node of this cluster"
            }
            Self::OtherProxy => {
                "see which process has the port: `ss -ltnp` on the node; balancers that read weights or nodeEligible need kube-proxy's answers"
            }
            Self::KubeletOnly => {
                "restart the kubelet; until then the balancer's controller may take the node out"
            }
            Self::NotAsked => "ask again from a machine that can, or with a smaller --at-once",
        }
    }
}
