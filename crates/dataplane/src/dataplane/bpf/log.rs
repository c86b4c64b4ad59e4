//! The packet path's log, forwarded to the agent's log in builds with the feature `log`.

use anyhow::{Context, Result};
use aya::Ebpf;
use aya_log::EbpfLogger;
use tokio::io::{Interest, unix::AsyncFd};

/// Starts to follow the log. It must be called within a tokio runtime.
pub fn follow(object: &mut Ebpf) -> Result<()> {
    // Another part of the process may have set the logger.
    let _ = tracing_log::LogTracer::init();
    let logger = EbpfLogger::init(object).context("the packet path was built without its log")?;
    // SAFETY: the logger owns its ring buffer's descriptor and closes it only when it is dropped,
    // after the AsyncFd.
    let logger = unsafe { AsyncFd::register_with_interest(logger, Interest::READABLE) };
    let mut logger = logger.map_err(|error| anyhow::anyhow!("the log cannot be waited for: {error}"))?;
    tokio::spawn(async move {
        while let Ok(mut ready) = logger.readable_mut().await {
            ready.get_inner_mut().flush();
            ready.clear_ready();
        }
    });
    Ok(())
}
