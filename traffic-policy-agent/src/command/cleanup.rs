//! `cleanup`: leaves the node as it was before the first `run`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use crate::{
    dataplane::{self, DEFAULT_PINS},
    node::{self, Network},
};

/// Detach all programs of this agent and free its maps, of any version. Nothing else is touched.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// The folder that `run` was given.
    #[arg(long, env = "TRAFFIC_POLICY_PIN_DIR", default_value = DEFAULT_PINS, value_name = "D")]
    pin_dir: PathBuf,
}

impl Arguments {
    pub(super) fn execute(self) -> Result<()> {
        let dir = self.pin_dir.display();
        let devices = dataplane::pinned_devices(&self.pin_dir);
        if dataplane::cleanup(&self.pin_dir)? {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let (network, _events) = Network::connect()?;
                node::release(&network, &devices).await
            })?;
            println!("removed all programs and maps pinned in {dir}");
        } else {
            println!("nothing is pinned in {dir}");
        }
        Ok(())
    }
}
