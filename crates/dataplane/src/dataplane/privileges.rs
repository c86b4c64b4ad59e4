//! Capabilities of this process, and those that the agent needs.

use std::io::{self, ErrorKind};

use anyhow::{Context, Result, bail};

/// Capabilities that the agent needs, each with what it is for.
const NEEDED: [(u32, &str, &str); 3] = [
    (39, "CAP_BPF", "load the packet path and create its maps"),
    (CAP_NET_ADMIN, "CAP_NET_ADMIN", "attach programs to network devices and keep neighbours resolved"),
    (38, "CAP_PERFMON", "let the packet path compare packet pointers"),
];
const CAP_NET_ADMIN: u32 = 12;
const CAP_SYS_ADMIN: u32 = 21;
/// To find the sockets of other users' processes.
const CAP_SYS_PTRACE: u32 = 19;
const CAP_NET_BIND_SERVICE: u32 = 10;
/// More than any kernel knows.
const CAPABILITIES: u32 = 64;

/// The capabilities that the agent keeps, as bits: of those that are there.
fn of_agent(effective: u64, low_ports: bool) -> u64 {
    let mut kept = NEEDED.iter().fold(0, |bits, (number, ..)| bits | bit(*number));
    // In the place of CAP_BPF or CAP_PERFMON, where a runtime does not know those.
    if effective & kept != kept {
        kept |= bit(CAP_SYS_ADMIN);
    }
    if low_ports {
        kept |= bit(CAP_NET_BIND_SERVICE);
    }
    effective & kept
}

fn bit(number: u32) -> u64 {
    1 << number
}

/// Gives up all capabilities that the agent does not need, for good. Called while this process has one thread: the others
/// inherit what that has. `low_ports`: it listens on ports below 1024.
///
/// # Errors
/// The kernel refuses.
pub fn drop_privileges(low_ports: bool) -> Result<()> {
    keep(of_agent(effective_capabilities()?, low_ports))
}

/// As [`drop_privileges`], for the process that ends UDP sockets in the network namespaces of pods.
///
/// # Errors
/// As there.
pub fn drop_privileges_to_end_sockets() -> Result<()> {
    let needed = bit(CAP_NET_ADMIN) | bit(CAP_SYS_ADMIN) | bit(CAP_SYS_PTRACE);
    keep(effective_capabilities()? & needed)
}

/// Gives up all capabilities but these, which it has.
fn keep(kept: u64) -> Result<()> {
    // SAFETY: these calls take numbers only.
    unsafe {
        // Bounding set: needs CAP_SETPCAP, so its result is ignored.
        for number in (0..CAPABILITIES).filter(|number| kept >> number & 1 == 0) {
            libc::prctl(libc::PR_CAPBSET_DROP, libc::c_ulong::from(number), 0, 0, 0);
        }
        libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
        if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 {
            return Err(io::Error::last_os_error()).context("giving up new privileges failed");
        }
    }
    // linux/capability.h: version 3, two sets of 32 bits each of effective, permitted and inheritable ones.
    let header = [0x2008_0522_u32, 0];
    let (low, high) = (kept as u32, (kept >> 32) as u32);
    let sets = [low, low, 0, high, high, 0];
    // SAFETY: header and sets are as the version says, and outlive the call.
    let result = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) };
    if result != 0 {
        return Err(io::Error::last_os_error()).context("giving up capabilities failed");
    }
    Ok(())
}

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

#[cfg(test)]
mod tests {
    use super::*;

    const THREE: u64 = 1 << 39 | 1 << 12 | 1 << 38;

    #[test]
    fn no_more_is_kept_than_is_needed() {
        let all = (1 << 41) - 1;
        assert_eq!(of_agent(all, false), THREE);
        assert_eq!(of_agent(all, true), THREE | 1 << 10);
        assert_eq!(of_agent(THREE, true), THREE, "what is not there is not kept");
        // A runtime that knows no CAP_BPF.
        assert_eq!(of_agent(1 << 21 | 1 << 12 | 1 << 3, false), 1 << 21 | 1 << 12);
    }
}
