//! Errors of the kernel: their number, their causes, and netlink's message.

use std::{error::Error, io};

use aya::programs::{ProgramError, xdp::XdpError};

/// Returns the number of the kernel's error.
pub fn errno(error: &ProgramError) -> Option<i32> {
    match error {
        // These display another error as their own, and omit it from the chain of causes.
        ProgramError::IOError(error) => error.raw_os_error(),
        ProgramError::XdpError(XdpError::NetlinkError(error)) => error.raw_os_error(),
        error => causes(error).find_map(|cause| cause.downcast_ref::<io::Error>()?.raw_os_error()),
    }
}

fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error| (*error).source())
}

/// Returns the kernel's own message (the extended acknowledgement of netlink), if netlink was used:
/// aya uses it after EINVAL, and passes the message on only in its text, as `netlink error: ["…"]`.
pub fn kernel_words(error: &(dyn Error + 'static)) -> Option<String> {
    causes(error).find_map(|cause| {
        let text = cause.to_string();
        let words = text.strip_prefix("netlink error: [\"")?.strip_suffix("\"]")?;
        Some(words.replace("\", \"", "; "))
    })
}

/// Formats an error with its causes, on one line.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}
