//! `completion`: a script that lets a shell complete commands, flags and their values.

use std::io;

use anyhow::Result;
use clap::Args;
use clap_complete::{Shell, generate};

use super::view;

/// Print a script that lets a shell complete this program's commands and flags. Load it in the
/// shell's start file: `source <(traffic-policy-agent completion bash)`.
#[derive(Debug, Args)]
pub struct Arguments {
    #[arg(value_name = "SHELL", help = "The shell")]
    shell: Shell,
}

impl Arguments {
    /// Prints the script for the program under the name by which it was called.
    pub fn execute(self, mut command: clap::Command) -> Result<()> {
        // A plugin of kubectl is typed with a space, and no shell completes a name that has one.
        let name = match command.get_bin_name() {
            Some(name) if !name.contains(' ') => name.to_owned(),
            _ => command.get_name().to_owned(),
        };
        let script = match self.shell {
            Shell::Bash => for_bash(command, &name)?,
            shell => {
                let mut script = Vec::new();
                generate(shell, &mut command, name, &mut script);
                script
            }
        };
        view::print(|out| io::Write::write_all(out, &script))
    }
}

/// Generates the bash script. If the program's name has a hyphen, clap_complete 4.6 defines the
/// cases of sub-commands under other names than it looks up, and completes nothing after the first
/// command (<https://github.com/clap-rs/clap/issues/6421>). So the script is generated for a name
/// without hyphens, and registered for the program's own name.
fn for_bash(mut command: clap::Command, name: &str) -> Result<Vec<u8>> {
    let plain = name.replace('-', "_");
    let mut script = Vec::new();
    generate(Shell::Bash, &mut command, plain.as_str(), &mut script);
    let script = String::from_utf8(script)?;
    let mut named = String::new();
    for line in script.lines() {
        match line.strip_suffix(plain.as_str()).filter(|_| line.trim_start().starts_with("complete ")) {
            Some(start) => named.extend([start, name]),
            None => named.push_str(line),
        }
        named.push('\n');
    }
    Ok(named.into_bytes())
}
