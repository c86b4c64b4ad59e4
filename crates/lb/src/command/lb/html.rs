//! `--html`: the printed output, also written as a page.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use crate::page::{self, Page};

/// Arguments for a page in addition to the printed output.
#[derive(Debug, Args)]
pub(super) struct HtmlArguments {
    /// Also write a self-contained HTML page to this file, which is replaced: a map of nodes and
    /// pods, tables, findings.
    #[arg(long, env = "TRAFFIC_POLICY_LB_HTML", value_name = "FILE")]
    html: Option<PathBuf>,
}

impl HtmlArguments {
    /// Fails early if the page cannot be written there, because listing a cluster takes a while.
    pub(super) fn check(&self) -> Result<()> {
        self.html.as_deref().map_or(Ok(()), page::check)
    }

    /// Writes a page, if one is requested.
    pub(super) fn write(&self, make: impl FnOnce() -> Result<Page>) -> Result<()> {
        match &self.html {
            Some(path) => make()?.write(path),
            None => Ok(()),
        }
    }
}
