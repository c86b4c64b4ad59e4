//! The fields of KubeProxyConfiguration, v1alpha1: the flag that each of them sets, or the reason
//! why it has no effect.
//!
//! As of Kubernetes 1.36:
//! <https://github.com/kubernetes/kubernetes/blob/v1.36.0/staging/src/k8s.io/kube-proxy/config/v1alpha1/types.go>

/// A field of KubeProxyConfiguration.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// The field's name, preceded by those of the fields that contain it, separated by dots.
    pub path: &'static str,
    pub meaning: Meaning,
}

#[derive(Clone, Copy, Debug)]
pub enum Meaning {
    /// Sets the flag that has this id on the command line.
    Flag(&'static str, Kind),
    /// Has no effect.
    Ignored {
        /// Sentence about the setting that applies instead.
        why: &'static str,
        /// Values that request nothing, in addition to empty ones.
        ordinary: &'static [&'static str],
    },
}

/// Syntax of a field's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The name of a Node, in any case.
    NodeName,
    Path,
    /// IP:PORT, or an IP address with this port.
    Address(u16),
    /// A list of CIDRs and words.
    NodePortAddresses,
    Time,
    LogFormat,
    /// A klog verbosity, from 0.
    Verbosity,
}

const fn flag(path: &'static str, id: &'static str, kind: Kind) -> Field {
    Field { path, meaning: Meaning::Flag(id, kind) }
}

const fn ignored(path: &'static str, why: &'static str) -> Field {
    ordinary(path, &[], why)
}

const fn ordinary(path: &'static str, ordinary: &'static [&'static str], why: &'static str) -> Field {
    Field { path, meaning: Meaning::Ignored { why, ordinary } }
}

const NO_RULES: &str = "there are no rules of iptables, nftables or ipvs";
const NO_MARK: &str = "no packet is marked";
const NO_MASQUERADE_ALL: &str = "the source of a connection to a ClusterIP stays what it is";
const NO_RESYNC: &str = "each change is written when it comes, the first of a burst at once";
const CLIENT: &str = "the agent's client has its own limits and speaks JSON";
const INSIDE: &str =
    "what this node and its pods send is told by the cgroup's programs and the Node's pod ranges";
const CONNTRACK: &str =
    "there is no conntrack table: --flow-entries and --flow-entries-v6 say how many flows have room";
const KLOG: &str = "lines are written at once, to standard error; --log has levels per module";
const WINDOWS: &str = "this is not Windows";

/// All fields that kube-proxy knows.
pub const FIELDS: &[Field] = &[
    flag("hostnameOverride", "node_name", Kind::NodeName),
    flag("clientConnection.kubeconfig", "kubeconfig", Kind::Path),
    flag("healthzBindAddress", "healthz_address", Kind::Address(10256)),
    flag("metricsBindAddress", "metrics_address", Kind::Address(10249)),
    flag("nodePortAddresses", "node_port_addresses", Kind::NodePortAddresses),
    flag("conntrack.tcpEstablishedTimeout", "idle_established", Kind::Time),
    flag("conntrack.tcpCloseWaitTimeout", "idle_half_closed", Kind::Time),
    flag("conntrack.udpTimeout", "idle_udp", Kind::Time),
    flag("conntrack.udpStreamTimeout", "idle_udp_answered", Kind::Time),
    flag("logging.verbosity", "log", Kind::Verbosity),
    flag("logging.format", "log_format", Kind::LogFormat),
    ignored("featureGates", "features are not chosen by gates"),
    ignored("mode", "packets are served by XDP, TC and socket programs: --attach, --cgroup"),
    ordinary(
        "bindAddress",
        &["0.0.0.0", "::"],
        "the node's addresses are those of its Node object, and both families are served",
    ),
    ignored(
        "bindAddressHardFail",
        "an address of --healthz-address or --metrics-address that is taken always ends the start",
    ),
    ignored("enableProfiling", "no profiles are served"),
    ignored("showHiddenMetricsForVersion", "no metric is hidden"),
    ignored("clusterCIDR", INSIDE),
    ignored("detectLocalMode", INSIDE),
    ignored("detectLocal.bridgeInterface", INSIDE),
    ignored("detectLocal.interfaceNamePrefix", INSIDE),
    ignored(
        "oomScoreAdj",
        "it takes CAP_SYS_RESOURCE: the kubelet (priorityClassName system-node-critical) or systemd (OOMScoreAdjust=) sets it",
    ),
    ignored("configSyncPeriod", "objects are watched, and listed anew when a watch breaks"),
    ignored("portRange", "kube-proxy does not use it either; the range of node ports is --node-ports"),
    ignored("windowsRunAsService", WINDOWS),
    ignored("clientConnection.acceptContentTypes", CLIENT),
    ignored("clientConnection.contentType", CLIENT),
    ignored("clientConnection.qps", CLIENT),
    ignored("clientConnection.burst", CLIENT),
    ignored("conntrack.maxPerCore", CONNTRACK),
    ignored("conntrack.min", CONNTRACK),
    ignored(
        "conntrack.tcpBeLiberal",
        "TCP state follows sequence numbers, and what does not fit passes untouched",
    ),
    ordinary("logging.flushFrequency", &["5s", "5000000000"], KLOG),
    ignored("logging.vmodule", KLOG),
    ignored("logging.options.text.splitStream", KLOG),
    ignored("logging.options.text.infoBufferSize", KLOG),
    ignored("logging.options.json.splitStream", KLOG),
    ignored("logging.options.json.infoBufferSize", KLOG),
    ignored("iptables.masqueradeBit", NO_MARK),
    ignored("iptables.masqueradeAll", NO_MASQUERADE_ALL),
    ordinary(
        "iptables.localhostNodePorts",
        &["true"],
        "--node-port-addresses says whether the node reaches node ports on loopback",
    ),
    ignored("iptables.syncPeriod", NO_RESYNC),
    ordinary("iptables.minSyncPeriod", &["1s"], NO_RESYNC),
    ignored("nftables.masqueradeBit", NO_MARK),
    ignored("nftables.masqueradeAll", NO_MASQUERADE_ALL),
    ignored("nftables.syncPeriod", NO_RESYNC),
    ordinary("nftables.minSyncPeriod", &["1s"], NO_RESYNC),
    ignored("ipvs.syncPeriod", NO_RULES),
    ignored("ipvs.minSyncPeriod", NO_RULES),
    ignored("ipvs.scheduler", "endpoints are chosen at random"),
    ignored("ipvs.excludeCIDRs", NO_RULES),
    ignored("ipvs.strictARP", "no address is put on a device, so none is answered for"),
    ignored("ipvs.tcpTimeout", "--idle-established, or conntrack.tcpEstablishedTimeout"),
    ignored("ipvs.tcpFinTimeout", "--idle-finished"),
    ignored("ipvs.udpTimeout", "--idle-udp-answered, or conntrack.udpStreamTimeout"),
    ignored("winkernel.networkName", WINDOWS),
    ignored("winkernel.sourceVip", WINDOWS),
    ignored("winkernel.enableDSR", WINDOWS),
    ignored("winkernel.rootHnsEndpointName", WINDOWS),
    ignored("winkernel.forwardHealthCheckVip", WINDOWS),
];

/// Fields that only identify the type of the object.
pub const TYPE: [&str; 2] = ["apiVersion", "kind"];

/// Returns the field that sets a flag.
#[must_use]
pub fn field_of(id: &str) -> Option<&'static str> {
    FIELDS.iter().find_map(|field| match field.meaning {
        Meaning::Flag(own, _) if own == id => Some(field.path),
        _ => None,
    })
}
