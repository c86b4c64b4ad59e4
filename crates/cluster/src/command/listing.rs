//! A listing of all objects of a cluster from its API, with a progress line on terminals.

use std::io::IsTerminal as _;

use anyhow::Result;

use crate::source::{self, Access, Listed, WholeCluster};

/// Lists Nodes, Services and EndpointSlices, and the Leases of direct forwarding, of one namespace
/// or of all, if the role allows it.
///
/// # Errors
/// The API cannot be reached, or does not return one of the first three kinds.
pub fn cluster(access: &Access, leases_of: Option<&str>) -> Result<WholeCluster> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let progress = Progress { shown: std::io::stderr().is_terminal() };
    let listed = runtime.block_on(source::list_cluster(access, leases_of, |listed| progress.show(listed)));
    progress.end();
    Ok(listed?)
}

/// A progress line on standard error, on terminals only.
struct Progress {
    shown: bool,
}

impl Progress {
    fn show(&self, listed: Listed) {
        if self.shown {
            let of =
                listed.remaining.map_or_else(String::new, |left| format!(" of {}", listed.objects + left));
            eprint!("\r\x1b[Klisting {}: {}{of}", listed.plural, listed.objects);
        }
    }

    fn end(&self) {
        if self.shown {
            eprint!("\r\x1b[K");
        }
    }
}
