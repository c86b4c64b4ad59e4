//! The capabilities of this process, and those that the agent needs.

use std::io::{self, ErrorKind};

use anyhow::{Context, Result, bail};

/// The capabilities that the agent needs, each with its purpose.
const NEEDED: [(u32, &str, &str); 3] = [
    (39, "CAP_BPF", "load the packet path and create its maps"),
    (CAP_NET_ADMIN, "CAP_NET_ADMIN", "attach programs to network devices and keep neighbours resolved"),
    (38, "CAP_PERFMON", "let the packet path compare packet pointers"),
];
const CAP_NET_ADMIN: u32 = 12;
const CAP_SYS_ADMIN: u32 = 21;
/// The capability to find the sockets of other users' processes.
const CAP_SYS_PTRACE: u32 = 19;
const CAP_NET_BIND_SERVICE: u32 = 10;
const CAP_NET_RAW: u32 = 13;
/// A number of capabilities greater than any kernel's.
const CAPABILITIES: u32 = 64;

/// Uses of capabilities that not every agent needs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extras {
    /// The agent listens on ports below 1024.
    pub low_ports: bool,
    /// The agent asks other nodes which directly forwarded packets get to them.
    pub raw_packets: bool,
}

/// Returns the capabilities that the agent keeps, as bits, out of its effective ones.
fn of_agent(effective: u64, extras: Extras) -> u64 {
    let mut kept = NEEDED.iter().fold(0, |bits, (number, ..)| bits | bit(*number));
    // CAP_SYS_ADMIN replaces CAP_BPF or CAP_PERFMON for container runtimes that do not know those.
    if effective & kept != kept {
        kept |= bit(CAP_SYS_ADMIN);
    }
    if extras.low_ports {
        kept |= bit(CAP_NET_BIND_SERVICE);
    }
    if extras.raw_packets {
        kept |= bit(CAP_NET_RAW);
    }
    effective & kept
}

fn bit(number: u32) -> u64 {
    1 << number
}

/// Drops all capabilities that the agent does not need, permanently. It must be called while this
/// process has one thread: later threads inherit that thread's capabilities.
pub fn drop_privileges(extras: Extras) -> Result<()> {
    keep(of_agent(effective_capabilities()?, extras))
}

/// Drops capabilities like [`drop_privileges`], for the process that destroys UDP sockets in the
/// network namespaces of pods.
pub fn drop_privileges_to_end_sockets() -> Result<()> {
    let needed = bit(CAP_NET_ADMIN) | bit(CAP_SYS_ADMIN) | bit(CAP_SYS_PTRACE);
    keep(effective_capabilities()? & needed)
}

/// Drops all capabilities except these, which the process has.
fn keep(kept: u64) -> Result<()> {
    // SAFETY: these calls take numbers only.
    unsafe {
        // Dropping from the bounding set needs CAP_SETPCAP, so the result is ignored.
        for number in (0..CAPABILITIES).filter(|number| kept >> number & 1 == 0) {
            libc::prctl(libc::PR_CAPBSET_DROP, libc::c_ulong::from(number), 0, 0, 0);
        }
        libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
        if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 {
            return Err(io::Error::last_os_error()).context("giving up new privileges failed");
        }
    }
    // The layout is that of linux/capability.h, version 3: two sets of 32 bits each of effective,
    // permitted and inheritable capabilities.
    let header = [0x2008_0522_u32, 0];
    let (low, high) = (kept as u32, (kept >> 32) as u32);
    let sets = [low, low, 0, high, high, 0];
    // SAFETY: header and sets have the layout of that version, and outlive the call.
    let result = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) };
    if result != 0 {
        return Err(io::Error::last_os_error()).context("giving up capabilities failed");
    }
    Ok(())
}

/// Returns the bits of this process's effective capabilities, numbered as in linux/capability.h.
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

/// Returns the capabilities that the agent needs and lacks, each with its purpose.
pub fn missing_privileges(effective: u64) -> Vec<(&'static str, &'static str)> {
    let has = |number: u32| effective >> number & 1 == 1;
    let missing = NEEDED
        .iter()
        .filter(|(number, name, _)| !has(*number) && (*name == "CAP_NET_ADMIN" || !has(CAP_SYS_ADMIN)));
    missing.map(|(_, name, purpose)| (*name, *purpose)).collect()
}

/// Checks that the agent has the capabilities that it needs.
///
/// # Errors
/// The error names every missing capability, its purpose, and what to write in a Kubernetes
/// manifest.
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
        let none = Extras::default();
        let extras = Extras { low_ports: true, raw_packets: true };
        assert_eq!(of_agent(all, none), THREE);
        assert_eq!(of_agent(all, Extras { low_ports: true, ..none }), THREE | 1 << 10);
        assert_eq!(of_agent(all, Extras { raw_packets: true, ..none }), THREE | 1 << 13);
        assert_eq!(of_agent(THREE, extras), THREE, "what is not there is not kept");
        // The runtime does not know CAP_BPF.
        assert_eq!(of_agent(1 << 21 | 1 << 12 | 1 << 3, none), 1 << 21 | 1 << 12);
    }
}
