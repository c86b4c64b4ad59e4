//! Capabilities of this process, and those that the agent needs.

use std::io::ErrorKind;

use anyhow::{Context, Result, bail};

/// Capabilities that the agent needs, each with what it is for.
const NEEDED: [(u32, &str, &str); 3] = [
    (39, "CAP_BPF", "load the packet path and create its maps"),
    (12, "CAP_NET_ADMIN", "attach programs to network devices and keep neighbours resolved"),
    (38, "CAP_PERFMON", "let the packet path compare packet pointers"),
];
const CAP_SYS_ADMIN: u32 = 21;

/// Bits of this process's effective capabilities, as linux/capability.h numbers them.
///
/// # Errors
/// /proc does not tell.
pub fn effective_capabilities() -> Result<u64> {
    let status = match std::fs::read_to_string("/proc/self/status") {
        Ok(status) => status,
        Err(error) if error.kind() == ErrorKind::NotFound => bail!("/proc is not mounted"),
        Err(error) => return Err(error).context("reading /proc/self/status failed"),
    };
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .context("/proc/self/status names no effective capabilities")
}

/// The capabilities that the agent needs and does not have, each with what it is for.
pub fn missing_privileges(effective: u64) -> Vec<(&'static str, &'static str)> {
    let has = |number: u32| effective >> number & 1 == 1;
    let missing = NEEDED
        .iter()
        .filter(|(number, name, _)| !has(*number) && (*name == "CAP_NET_ADMIN" || !has(CAP_SYS_ADMIN)));
    missing.map(|(_, name, purpose)| (*name, *purpose)).collect()
}

/// # Errors
/// Names every missing capability, what it is for, and what to write in a Kubernetes manifest.
pub fn check_privileges() -> Result<()> {
    let missing = missing_privileges(effective_capabilities()?);
    if missing.is_empty() {
        return Ok(());
    }
    let purposes: Vec<_> = missing.iter().map(|(name, purpose)| format!("{name} (to {purpose})")).collect();
    let names: Vec<_> = missing.iter().map(|(name, _)| name.trim_start_matches("CAP_")).collect();
    bail!(
        "missing privileges: {}. Run as root, or in Kubernetes set securityContext.capabilities.add: [{}]",
        purposes.join(", "),
        names.join(", ")
    )
}
