//! Flags of `run` for the sizes of maps, and for the times after which the flow table forgets.

use std::time::Duration;

use clap::Args;
use traffic_policy_cluster::model::parse_duration;
use traffic_policy_dataplane::{IdleTimes, MapSizes};

/// Capacity for Services.
#[derive(Debug, Args)]
#[command(next_help_heading = "Room for Services")]
pub(super) struct ServiceArguments {
    /// Addresses with a port on which Services are reached (ClusterIPs, node ports, load balancer
    /// addresses, external IPs), of each family, and one more for each ClusterIP and each node
    /// port. A Service port that does not fit is left out, and named.
    #[arg(long, env = "TRAFFIC_POLICY_FRONTEND_ENTRIES", default_value_t = MapSizes::DEFAULT.frontends, value_name = "N",
        value_parser = clap::value_parser!(u32).range(64..=1_048_576))]
    frontend_entries: u32,
    /// Ranges of all loadBalancerSourceRanges, of each family.
    #[arg(long, env = "TRAFFIC_POLICY_SOURCE_RANGE_ENTRIES", default_value_t = MapSizes::DEFAULT.source_ranges, value_name = "N",
        value_parser = clap::value_parser!(u32).range(64..=1_048_576))]
    source_range_entries: u32,
    /// Endpoints of all Service ports, of each family; one on this node of a Service with a Local
    /// policy counts twice.
    #[arg(long, env = "TRAFFIC_POLICY_ENDPOINT_ENTRIES", default_value_t = MapSizes::DEFAULT.slots, value_name = "N",
        value_parser = clap::value_parser!(u32).range(64..=4_194_304))]
    endpoint_entries: u32,
    /// Service ports; those of the two families count separately.
    #[arg(long, env = "TRAFFIC_POLICY_SERVICE_ENTRIES", default_value_t = MapSizes::DEFAULT.services, value_name = "N",
        value_parser = clap::value_parser!(u32).range(64..=1_048_576))]
    service_entries: u32,
    /// Counts of Service ports, one for each outcome that has occurred. Packets without room for
    /// their count are not counted.
    #[arg(long, env = "TRAFFIC_POLICY_SERVICE_COUNT_ENTRIES", default_value_t = MapSizes::DEFAULT.service_counts, value_name = "N",
        value_parser = clap::value_parser!(u32).range(64..=4_194_304))]
    service_count_entries: u32,
    /// Removed endpoints whose UDP flows and sockets are still to be ended.
    #[arg(long, env = "TRAFFIC_POLICY_REMOVED_ENDPOINT_ENTRIES", default_value_t = MapSizes::DEFAULT.removed_endpoints,
        value_name = "N", value_parser = clap::value_parser!(u32).range(64..=1_048_576))]
    removed_endpoint_entries: u32,
    /// This node's own addresses, of each family: packets from outside may not have them as their
    /// source.
    #[arg(long, env = "TRAFFIC_POLICY_NODE_ADDRESS_ENTRIES", default_value_t = MapSizes::DEFAULT.node_addresses, value_name = "N",
        value_parser = clap::value_parser!(u32).range(64..=1_048_576))]
    node_address_entries: u32,
}

/// The flow table.
#[derive(Debug, Args)]
#[command(next_help_heading = "Flow table")]
pub(super) struct TableArguments {
    /// Entries for IPv4, two per flow; best twice as many as flows need. 128 bytes each.
    #[arg(long, env = "TRAFFIC_POLICY_FLOW_ENTRIES", default_value_t = MapSizes::DEFAULT.flows4, value_name = "N",
        value_parser = clap::value_parser!(u32).range(64..=16_777_216))]
    flow_entries: u32,
    /// Entries for IPv6. 176 bytes each.
    #[arg(long, env = "TRAFFIC_POLICY_FLOW_ENTRIES_V6", default_value_t = MapSizes::DEFAULT.flows6, value_name = "N",
        value_parser = clap::value_parser!(u32).range(64..=16_777_216))]
    flow_entries_v6: u32,
    /// IPv4 TCP flows that no client has confirmed yet, half as many of IPv6, as many of UDP:
    /// rounded up to a power of two. A new one takes the place of the oldest, so the time for a
    /// client to connect is this number divided by the rate of new flows.
    #[arg(long, env = "TRAFFIC_POLICY_UNASSURED_ENTRIES", default_value_t = MapSizes::DEFAULT.unassured, value_name = "N",
        value_parser = clap::value_parser!(u32).range(64..=4_194_304))]
    unassured_entries: u32,
    /// Clients of Services with session affinity; the one seen longest ago is evicted first.
    #[arg(long, env = "TRAFFIC_POLICY_AFFINITY_ENTRIES", default_value_t = MapSizes::DEFAULT.affinity, value_name = "N",
        value_parser = clap::value_parser!(u32).range(1024..=16_777_216))]
    affinity_entries: u32,
    /// Sockets of this node and its pods that communicate with a Service: as many connected UDP
    /// sockets, and as many of all others.
    #[arg(long, env = "TRAFFIC_POLICY_SOCKET_ENTRIES", default_value_t = MapSizes::DEFAULT.sockets, value_name = "N",
        value_parser = clap::value_parser!(u32).range(1024..=16_777_216))]
    socket_entries: u32,
    /// Fragmented datagrams in transit at a time, of each family.
    #[arg(long, env = "TRAFFIC_POLICY_FRAGMENT_ENTRIES", default_value_t = MapSizes::DEFAULT.fragments, value_name = "N",
        value_parser = clap::value_parser!(u32).range(1024..=1_048_576))]
    fragment_entries: u32,
    /// Entries, of each family, for packets that this node itself has sent and expects answers to:
    /// datagrams from a frontend's port, and uses of a SNAT port towards an endpoint, which is not
    /// given to a flow meanwhile. The oldest entry is evicted first.
    #[arg(long, env = "TRAFFIC_POLICY_OWN_SENT_ENTRIES", default_value_t = MapSizes::DEFAULT.own_sent, value_name = "N",
        value_parser = clap::value_parser!(u32).range(1024..=1_048_576))]
    own_sent_entries: u32,
    /// Idle time of an established TCP connection.
    #[arg(long, env = "TRAFFIC_POLICY_IDLE_ESTABLISHED", default_value = "24h", value_name = "TIME", value_parser = duration)]
    idle_established: Duration,
    /// Idle time of a TCP connection after FIN in one direction.
    #[arg(long, env = "TRAFFIC_POLICY_IDLE_HALF_CLOSED", default_value = "1h", value_name = "TIME", value_parser = duration)]
    idle_half_closed: Duration,
    /// Idle time of a TCP connection after FIN in both directions.
    #[arg(long, env = "TRAFFIC_POLICY_IDLE_FINISHED", default_value = "2m", value_name = "TIME", value_parser = duration)]
    idle_finished: Duration,
    /// Idle time of a TCP connection after RST.
    #[arg(long, env = "TRAFFIC_POLICY_IDLE_RESET", default_value = "10s", value_name = "TIME", value_parser = duration)]
    idle_reset: Duration,
    /// Idle time of a TCP connection that is not assured: the client has not confirmed it.
    #[arg(long, alias = "idle-unconfirmed", env = "TRAFFIC_POLICY_IDLE_UNASSURED", default_value = "1m", value_name = "TIME", value_parser = duration)]
    idle_unassured: Duration,
    /// Idle time of a UDP flow without an answer, or of a request and its answer.
    #[arg(long, env = "TRAFFIC_POLICY_IDLE_UDP", default_value = "30s", value_name = "TIME", value_parser = duration)]
    idle_udp: Duration,
    /// Idle time of a UDP flow that is assured: it was answered, and either side still sent two
    /// seconds after its first datagram.
    #[arg(long, env = "TRAFFIC_POLICY_IDLE_UDP_ANSWERED", default_value = "2m", value_name = "TIME", value_parser = duration)]
    idle_udp_answered: Duration,
}

impl TableArguments {
    pub(super) fn idle(&self) -> IdleTimes {
        IdleTimes {
            established: self.idle_established,
            half_closed: self.idle_half_closed,
            finished: self.idle_finished,
            reset: self.idle_reset,
            unassured: self.idle_unassured,
            udp: self.idle_udp,
            udp_answered: self.idle_udp_answered,
        }
    }
}

/// Returns the sizes of all maps; `maglev` is that of the tables of Services.
pub(super) fn sizes(services: &ServiceArguments, table: &TableArguments, maglev: u32) -> MapSizes {
    MapSizes {
        flows4: table.flow_entries,
        flows6: table.flow_entries_v6,
        unassured: table.unassured_entries,
        frontends: services.frontend_entries,
        source_ranges: services.source_range_entries,
        slots: services.endpoint_entries,
        services: services.service_entries,
        maglev,
        service_counts: services.service_count_entries,
        removed_endpoints: services.removed_endpoint_entries,
        node_addresses: services.node_address_entries,
        affinity: table.affinity_entries,
        sockets: table.socket_entries,
        fragments: table.fragment_entries,
        own_sent: table.own_sent_entries,
    }
}

/// Parses a time.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    parse_duration(text).ok_or_else(|| format!("`{text}` is not a time: write 30s, 2m, 24h or 0"))
}
