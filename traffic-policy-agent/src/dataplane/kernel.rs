//! What the running kernel can do, and its clocks.

use std::{
    io::{self, ErrorKind},
    net::{Ipv4Addr, UdpSocket},
    os::fd::AsRawFd,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use nix::{
    sys::utsname,
    time::{ClockId, clock_gettime},
};

/// Version of the running kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    pub major: u32,
    pub minor: u32,
}

impl Kernel {
    /// # Errors
    /// A release that does not start with two numbers, or one older than 6.1.
    pub fn running() -> Result<Self> {
        let (kernel, release) = Self::found()?;
        if !kernel.at_least(6, 1) {
            bail!("kernel {release} is too old: Linux 6.1 or newer is needed");
        }
        Ok(kernel)
    }

    /// The running kernel, however old, and its release as it calls itself.
    ///
    /// # Errors
    /// A release that does not start with two numbers.
    pub fn found() -> Result<(Self, String)> {
        let name = utsname::uname().context("uname failed")?;
        let release = name.release().to_string_lossy().into_owned();
        let kernel =
            Self::parse(&release).with_context(|| format!("kernel release `{release}` is not understood"))?;
        Ok((kernel, release))
    }

    fn parse(release: &str) -> Option<Self> {
        let mut numbers = release.split(|c: char| !c.is_ascii_digit());
        Some(Self { major: numbers.next()?.parse().ok()?, minor: numbers.next()?.parse().ok()? })
    }

    pub fn at_least(self, major: u32, minor: u32) -> bool {
        (self.major, self.minor) >= (major, minor)
    }

    /// TC programs are attached by links of their own (tcx), which outlive the agent.
    pub fn has_tcx(self) -> bool {
        self.at_least(6, 6)
    }
}

/// Gives memory back that was freed but is kept for what comes next: after the lists of a large cluster that is as much as
/// what remains of them, and nothing as large comes soon.
pub fn release_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: no pointer is handed over, and memory that is in use stays.
    unsafe {
        libc::malloc_trim(0)
    };
}

/// The clock of `Frontend::drain_until`, in nanoseconds.
///
/// # Errors
/// None on Linux.
pub fn monotonic() -> Result<u64> {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).context("clock_gettime failed")?;
    Ok(Duration::from(now).as_nanos() as u64)
}

/// Jiffies per second, measured: no interface tells CONFIG_HZ.
pub fn sample_hz(mut jiffies: impl FnMut() -> Result<u32>) -> Result<u32> {
    let (start, first) = (Instant::now(), jiffies()?);
    std::thread::sleep(Duration::from_millis(60));
    let (elapsed, last) = (start.elapsed(), jiffies()?);
    let measured = f64::from(last.wrapping_sub(first)) / elapsed.as_secs_f64();
    let known = [100u32, 250, 300, 1000];
    known.into_iter().min_by_key(|hz| (f64::from(*hz) - measured).abs() as u64).context("no known tick rate")
}

/// The kernel's number of this process's network namespace, as programs see it.
///
/// # Errors
/// The kernel refuses a socket.
pub fn netns_cookie() -> Result<u64> {
    let socket =
        UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).context("no socket to ask for the network namespace")?;
    let mut cookie = 0_u64;
    let mut length = size_of_val(&cookie) as libc::socklen_t;
    // SAFETY: the option is a word of eight bytes, which is what there is room for.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    if done != 0 {
        return Err(io::Error::last_os_error()).context("the network namespace has no number");
    }
    Ok(cookie)
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases() {
        assert_eq!(Kernel::parse("6.18.44-fc-v657"), Some(Kernel { major: 6, minor: 18 }));
        assert_eq!(Kernel::parse("6.1-rc3"), Some(Kernel { major: 6, minor: 1 }));
        assert_eq!(Kernel::parse("none"), None);
        assert!(Kernel { major: 7, minor: 0 }.at_least(6, 16));
        assert!(!Kernel { major: 6, minor: 5 }.has_tcx());
    }

    #[test]
    fn hz_from_a_clock() {
        for hz in [100u32, 250, 1000] {
            let start = Instant::now();
            let found = sample_hz(|| Ok((start.elapsed().as_secs_f64() * f64::from(hz)) as u32)).unwrap();
            assert_eq!(found, hz);
        }
    }
}
