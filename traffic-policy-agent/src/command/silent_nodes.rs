//! Flags of `run` for nodes that die without a word.

use clap::Args;

use crate::controller::Silence;

#[derive(Debug, Args)]
#[command(next_help_heading = "Nodes that die")]
pub(super) struct SilenceArguments {
    /// Number of connections to the endpoints of a node that must remain without any answer for 200
    /// ms, while nothing else comes from them, before the node is asked whether it is alive. Until
    /// it is, its endpoints get no new flows. 0: no node is asked.
    #[arg(long, env = "TRAFFIC_POLICY_SUSPECT_SYNS", default_value_t = 3, value_name = "N")]
    suspect_syns: u32,
    /// The most nodes whose endpoints are left out at a time, in percent of all nodes with
    /// endpoints, this one included. Of more dead nodes, those that have been for longest are.
    #[arg(long, env = "TRAFFIC_POLICY_MAX_LEFT_OUT", default_value_t = 50, value_name = "PERCENT",
        value_parser = clap::value_parser!(u8).range(0..=100))]
    max_left_out: u8,
}

impl SilenceArguments {
    pub(super) fn silence(&self) -> Silence {
        Silence { suspect_syns: self.suspect_syns, max_left_out: self.max_left_out }
    }
}
