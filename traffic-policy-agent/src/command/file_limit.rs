//! The number of files that the process may have open.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tracing::debug;

/// Raises the soft limit (1,024 in most shells) to the hard one, as Go's runtime does for
/// kube-proxy: each health-check port is a file, and so is each connection to it. If that is
/// refused, the limit stays as it was.
pub(super) fn raise() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        debug!("the limit of open files stays as it is: {error}");
    }
}
