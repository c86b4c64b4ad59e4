//! A listing of all objects of a cluster from its API, with a progress line on terminals.

use std::io::IsTerminal as _;

use anyhow::Result;

use crate::source::{self, Access, Batch, Listed};

/// Lists Nodes, Services and EndpointSlices.
///
/// # Errors
/// The API cannot be reached, or does not return one of these kinds.
pub fn cluster(access: &Access) -> Result<Batch> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let progress = Progress { shown: std::io::stderr().is_terminal() };
    let batch = runtime.block_on(source::list_cluster(access, |listed| progress.show(listed)));
    progress.end();
    Ok(batch?)
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
