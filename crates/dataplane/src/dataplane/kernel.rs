//! The version of the running kernel, and the memory and network namespace of this process.

use std::{
    io,
    net::{Ipv4Addr, UdpSocket},
    os::fd::AsRawFd,
};

use anyhow::{Context, Result, bail};
use nix::sys::utsname;

use super::privileges::check_privileges;

/// The version of the running kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    pub major: u32,
    pub minor: u32,
}

impl Kernel {
    /// Returns the version of the running kernel.
    ///
    /// # Errors
    /// The release does not start with two numbers, or is older than 6.1.
    pub fn running() -> Result<Self> {
        let (kernel, release) = Self::found()?;
        if !kernel.at_least(6, 1) {
            bail!("kernel {release} is too old: Linux 6.1 or newer is needed");
        }
        Ok(kernel)
    }

    /// Returns the version of the running kernel, however old, and its release string.
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

    /// Whether TC programs are attached by links (tcx), which outlive the agent.
    pub fn has_tcx(self) -> bool {
        self.at_least(6, 6)
    }
}

/// Whether aya, which asks the kernel once in a process what it can do, believes that it has no
/// global variables. All supported kernels have them: a signal has come meanwhile.
pub fn is_mistaken() -> bool {
    check_privileges().is_ok() && !aya::features().bpf_global_data()
}

/// Makes the allocator ask the kernel for each block of 16 KiB or more, and return it when it is
/// freed. Otherwise that is done from 128 KiB on, and glibc raises this limit to the largest block
/// that was freed, up to 32 MiB: loading the programs leaves a heap of 40 MB with holes, in which
/// what follows is scattered.
pub fn return_large_blocks() {
    #[cfg(target_env = "gnu")]
    // SAFETY: no pointer is passed, and blocks that there are stay as they are.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 16 << 10)
    };
}

/// Returns freed memory that the allocator has kept for later use: after the lists of a large
/// cluster that is as much as what remains of them, and nothing as large follows soon.
pub fn release_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: no pointer is passed, and memory that is in use stays.
    unsafe {
        libc::malloc_trim(0)
    };
}

/// Returns the kernel's cookie of this process's network namespace, as programs see it.
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
}
