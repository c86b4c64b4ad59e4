//! Flags of `run` for the choice of the endpoint of a new connection.

use clap::Args;
use traffic_policy_cluster::model::{Algorithm, maglev::TableSize};
use traffic_policy_dataplane::MapSizes;

#[derive(Debug, Args)]
#[command(next_help_heading = "Choice of endpoints")]
pub(super) struct ChoiceArguments {
    /// How the endpoint of a new connection from outside is chosen for Services whose annotation
    /// traffic-policy.io/algorithm names no other way. `maglev`: by a table that is equal on every
    /// node.
    #[arg(long, env = "TRAFFIC_POLICY_ALGORITHM", default_value_t, value_name = "random|maglev")]
    pub(super) algorithm: Algorithm,
    /// Slots of a Maglev table, the same number on every node: 251, 509, 1021, 2039, 4093, 8191,
    /// 16381, 32749, 65521 or 131071; best 100 for each endpoint.
    #[arg(long, env = "TRAFFIC_POLICY_MAGLEV_SIZE", default_value_t, value_name = "N")]
    pub(super) maglev_size: TableSize,
    /// Elements of all Maglev tables, of eight bytes for four slots each: a table of 16,381 slots
    /// takes 4,096. One more table than Service ports have is needed for changes.
    #[arg(long, env = "TRAFFIC_POLICY_MAGLEV_ENTRIES", default_value_t = MapSizes::DEFAULT.maglev, value_name = "N",
        value_parser = clap::value_parser!(u32).range(64..=67_108_864))]
    pub(super) maglev_entries: u32,
}
