//! A start that begins anew because a signal came while the kernel was asked what it can do.
//!
//! aya asks once in a process, by loading small programs. If the process is stopped or frozen
//! meanwhile, the verifier gives up with EAGAIN, and aya takes that for a kernel without global
//! variables: the packet path does not load.
//! <https://github.com/torvalds/linux/blob/v6.12/kernel/bpf/verifier.c> (`do_check`)

use std::{env, os::unix::process::CommandExt as _, process::Command};

use tracing::warn;

/// The variable that counts the starts before this one; no flag has it.
const VARIABLE: &str = "TRAFFIC_POLICY_STARTED_AGAIN";
/// The largest number of starts that begin anew: one that fails as often has another cause, which
/// loading the packet path names.
const MOST: u32 = 5;

/// Starts this program again, with the same arguments and process number, if aya mistakes the
/// kernel. Called before anything is opened or changed.
pub(super) fn if_the_kernel_is_mistaken() {
    let before = env::var(VARIABLE).ok().and_then(|number| number.parse().ok()).unwrap_or(0_u32);
    if before >= MOST || !traffic_policy_dataplane::mistakes_the_kernel() {
        return;
    }
    let mut arguments = env::args_os();
    let mut command = Command::new("/proc/self/exe");
    if let Some(name) = arguments.next() {
        command.arg0(name);
    }
    // It returns only if it fails.
    let error = command.args(arguments).env(VARIABLE, (before + 1).to_string()).exec();
    warn!(
        error = format!("{error:#}"),
        "a signal came while the kernel was asked what it can do, and the agent cannot be started again"
    );
}
