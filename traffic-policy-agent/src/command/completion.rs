//! `completion`: a script for a shell that completes commands, flags and their values.

use std::io;

use anyhow::Result;
use clap::Args;
use clap_complete::{Shell, generate};

use super::{kubectl, view};

/// Print a script that lets a shell complete this program's commands and flags. To be read by the shell's start file:
/// `source <(traffic-policy-agent completion bash)`.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[arg(value_name = "SHELL", help = "The shell")]
    shell: Shell,
}

impl Arguments {
    /// For the program as it was called.
    pub(super) fn execute(self, mut command: clap::Command) -> Result<()> {
        // The plugin's own name has a space, which no shell completes by.
        let name = match command.get_bin_name() {
            Some(kubectl::AS_TYPED) | None => command.get_name().to_owned(),
            Some(name) => name.to_owned(),
        };
        let mut script = Vec::new();
        generate(self.shell, &mut command, name, &mut script);
        view::print(|out| io::Write::write_all(out, &script))
    }
}
