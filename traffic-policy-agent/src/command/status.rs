//! `status`: what became of the packets so far.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use super::Output;
use crate::dataplane::{self, DEFAULT_PINS};

/// Show how many packets left the packet path in which way, since the maps were made.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// The folder that `run` was given.
    #[arg(long, env = "TRAFFIC_POLICY_PIN_DIR", default_value = DEFAULT_PINS, value_name = "D")]
    pin_dir: PathBuf,
    /// How to print.
    #[arg(long, env = "TRAFFIC_POLICY_OUTPUT", default_value = "table", value_name = "FORMAT")]
    output: Output,
}

impl Arguments {
    pub(super) fn execute(self) -> Result<()> {
        let counters = dataplane::pinned_counters(&self.pin_dir)?;
        match self.output {
            Output::Table => {
                println!("{:<8}  {:<28}  {:>12}", "HOOK", "OUTCOME", "PACKETS");
                for (hook, outcome, packets) in counters {
                    println!("{hook:<8}  {:<28}  {packets:>12}", outcome.name());
                }
            }
            Output::Json => {
                let rows: Vec<_> = counters
                    .iter()
                    .map(|(hook, outcome, packets)| {
                        serde_json::json!({"hook": hook, "outcome": outcome.name(), "packets": packets})
                    })
                    .collect();
                println!("{}", serde_json::to_string_pretty(&rows)?);
            }
        }
        Ok(())
    }
}
