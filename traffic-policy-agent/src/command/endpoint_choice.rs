//! Flags of `run` for the choice of the endpoint of a new connection, and the way to it.

use clap::Args;
use traffic_policy_cluster::model::{Algorithm, DispatchChoice, Forwarding, maglev::TableSize};
use traffic_policy_dataplane::{LocalDelivery, MapSizes, PodServices};
use traffic_policy_ebpf::hash::MAGLEV_SEED;

#[derive(Debug, Args)]
#[command(next_help_heading = "Choice of endpoints, and the way to them")]
pub(super) struct ChoiceArguments {
    /// Choice of the endpoint of a new connection from outside, for Services without the annotation
    /// traffic-policy.io/algorithm. `random`: at random; `maglev`: by a table that is equal on
    /// every node.
    #[arg(long, env = "TRAFFIC_POLICY_ALGORITHM", default_value_t, value_name = "random|maglev")]
    pub(super) algorithm: Algorithm,
    /// Slots of a Maglev table, the same number on every node: 251, 509, 1021, 2039, 4093, 8191,
    /// 16381, 32749, 65521 or 131071; best 100 for each endpoint.
    #[arg(long, env = "TRAFFIC_POLICY_MAGLEV_SIZE", default_value_t, value_name = "N")]
    pub(super) maglev_size: TableSize,
    /// Elements of all Maglev tables, of eight bytes for four slots each: a table of 16,381 slots
    /// takes 4,096. Changes need room for one table more than the Service ports have.
    #[arg(long, env = "TRAFFIC_POLICY_MAGLEV_ENTRIES", default_value_t = MapSizes::DEFAULT.maglev, value_name = "N",
        value_parser = clap::value_parser!(u32).range(64..=67_108_864))]
    pub(super) maglev_entries: u32,
    /// Way of packets to endpoints of other nodes. `snat`: with this node's address as source, and
    /// replies come back here; `direct`: unchanged within another packet (--dispatch), so that the
    /// endpoint sees the client, and its node answers without this one; `tunnel`: the same, but
    /// replies come back within another packet to this node, which sends them to the client, for
    /// networks that forbid other nodes' addresses as source. Only endpoints of nodes that say
    /// that they open such packets (--announce-opening) get them; all others use `snat`. The
    /// annotation traffic-policy.io/forwarding of a Service overrides it.
    #[arg(long, env = "TRAFFIC_POLICY_FORWARDING", default_value = "snat", value_name = "snat|direct|tunnel",
        value_parser = forwarding)]
    pub(super) forwarding: Forwarding,
    /// The outer packets in which packets are forwarded directly, to nodes that open them; all
    /// others use `snat`. `ipip`: IPv4 in IPv4, IPv6 in IPv6; `udp`: UDP, port 6080, for networks
    /// that let no other protocol through (Azure), or spread flows by the ports of UDP alone;
    /// `l2`: none, to the MAC address of the endpoint's node, for Services with `maglev`, to nodes
    /// of the same segment with the same --forwarding, --algorithm and --maglev-size; to others as
    /// `auto` within outer packets. `auto`: `l2` to nodes that have answered a packet sent so, to
    /// all others what the other node prefers (`udp` if that is its own --dispatch, else `ipip`),
    /// unless only the other one gets there: this node asks, with --announce-opening and
    /// CAP_NET_RAW. A node that opens packets opens both.
    #[arg(long, env = "TRAFFIC_POLICY_DISPATCH", default_value = "auto", value_name = "auto|ipip|udp|l2",
        value_parser = dispatch)]
    pub(super) dispatch: DispatchChoice,
    /// Take part in direct forwarding: tell the agents of other nodes, by a Lease in this
    /// namespace, while this node opens packets that they forward directly, and heed theirs. To be
    /// set on every node, whichever way its own packets take. This requires a role there: list,
    /// watch, create, patch and delete leases. With --manifests the Leases are files.
    #[arg(
        long,
        env = "TRAFFIC_POLICY_ANNOUNCE_OPENING",
        value_name = "NAMESPACE",
        conflicts_with = "manifests",
        value_parser = clap::builder::NonEmptyStringValueParser::new()
    )]
    pub(super) announce_opening: Option<String>,
    /// Way of packets to pods of this node. `stack`: through the node's stack, its firewall and
    /// conntrack. `direct`: the first and last packets of a connection pass the stack, so that
    /// rules about connections judge them; those in between go straight to the pod, and its replies
    /// straight to the client.
    #[arg(long, env = "TRAFFIC_POLICY_LOCAL_DELIVERY", default_value = "stack", value_name = "stack|direct")]
    pub(super) local_delivery: LocalDelivery,
    /// Services for pods whose sockets the programs on the cgroup do not see: Kata, KubeVirt,
    /// gVisor, other roots of cgroups, all pods with --cgroup none. `on`: what pods send to
    /// Services is translated at the host side of their devices; packets to other destinations
    /// stay as they are.
    #[arg(long, env = "TRAFFIC_POLICY_POD_SERVICES", default_value = "off", value_name = "off|on")]
    pub(super) pod_services: PodServices,
}

impl ChoiceArguments {
    /// Returns the settings that decide, beyond the cluster's objects, which endpoint a connection
    /// from outside gets on a node: two nodes with the same text choose alike.
    pub(super) fn of_endpoints(&self) -> String {
        of_endpoints(self.forwarding, self.algorithm, self.maglev_size)
    }

    /// Whether this node asks others what gets there of all that is forwarded directly.
    pub(super) const fn asks_nodes(&self) -> bool {
        self.announce_opening.is_some() && self.dispatch.is_left_to_the_network()
    }
}

/// Returns what [`ChoiceArguments::of_endpoints`] does, of these settings.
pub(super) fn of_endpoints(forwarding: Forwarding, algorithm: Algorithm, size: TableSize) -> String {
    format!("{} {algorithm} {size} {MAGLEV_SEED:x}", forwarding.name())
}

/// Parses `--forwarding`.
pub(super) fn forwarding(text: &str) -> Result<Forwarding, String> {
    Forwarding::parse(text).ok_or_else(|| "it is snat, direct or tunnel".to_owned())
}

/// Parses `--dispatch`.
pub(super) fn dispatch(text: &str) -> Result<DispatchChoice, String> {
    DispatchChoice::parse(text).ok_or_else(|| "it is auto, ipip, udp or l2".to_owned())
}
