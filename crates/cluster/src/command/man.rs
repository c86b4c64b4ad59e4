//! `man`: manual pages of the program and of each of its commands.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use clap::Args;
use clap_mangen::Man;

/// Write the manual pages (section 1) into a folder: one for the program and one for each command.
#[derive(Debug, Args)]
pub struct Arguments {
    /// A folder that exists, such as /usr/local/share/man/man1.
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

impl Arguments {
    /// Writes the pages for the program under the name by which it was called.
    pub fn execute(self, mut command: clap::Command) -> Result<()> {
        if !self.folder.is_dir() {
            bail!("{} is no folder: make it first", self.folder.display());
        }
        command = command.disable_help_subcommand(true);
        command.build();
        let name = command.get_name().to_owned();
        let count = write(&self.folder, &name, &command)?;
        println!("{count} pages written; read the first by `man {}/{name}.1`", self.folder.display());
        Ok(())
    }
}

/// Writes the page of a command and those of its sub-commands. Returns their number.
fn write(folder: &Path, name: &str, command: &clap::Command) -> Result<usize> {
    let page = Man::new(command.clone()).title(name.to_owned());
    let mut text = Vec::new();
    page.render(&mut text)?;
    let path = folder.join(format!("{name}.1"));
    fs::write(&path, text).with_context(|| format!("{} cannot be written", path.display()))?;
    let mut count = 1;
    for inner in command.get_subcommands() {
        count += write(folder, &format!("{name}-{}", inner.get_name()), inner)?;
    }
    Ok(count)
}
