//! Counts of TCP by the kernel: retransmitted segments of a connection or a namespace, and the
//! `tcp_info` of a connection as text.

use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd};
use std::{fs, io};

use anyhow::{Context, Result, ensure};
use nix::libc;

use crate::netns::Namespace;

/// The retransmitted segments of one connection (tcpi_total_retrans).
pub fn of(socket: &impl AsFd) -> Result<u32> {
    Ok(info(socket)?.tcpi_total_retrans)
}

/// The segments of one connection that the other end received twice (tcpi_dsack_dups).
pub(super) fn duplicate(socket: &impl AsFd) -> Result<u32> {
    Ok(info(socket)?.tcpi_dsack_dups)
}

/// The progress of a connection, from `struct tcp_info` of one end.
#[derive(Clone, Copy, Debug)]
pub struct State {
    /// The bytes that the other end has acknowledged.
    pub acknowledged: u64,
    pub received: u64,
    /// The bytes that may be under way from this end at once, by its congestion window.
    pub window: u64,
    /// Whether its last segment was sent because the time for an acknowledgement had passed.
    pub is_unanswered: bool,
}

/// Returns how far a connection is.
///
/// # Errors
/// getsockopt(2) fails.
pub fn state(socket: &impl AsFd) -> Result<State> {
    let info = info(socket)?;
    Ok(State {
        acknowledged: info.tcpi_bytes_acked,
        received: info.tcpi_bytes_received,
        window: u64::from(info.tcpi_snd_cwnd) * u64::from(info.tcpi_snd_mss),
        is_unanswered: info.tcpi_backoff > 0,
    })
}

/// Returns the `tcp_info` of a connection, open or failed, as one line: bytes and segments of each
/// direction, retransmissions, path MTU and MSS in bytes, and the number of back-offs.
///
/// # Errors
/// getsockopt(2) fails.
pub fn progress(socket: &impl AsFd) -> Result<String> {
    let info = info(socket)?;
    Ok(format!(
        "{} bytes acknowledged, {} received; {} of {} segments with data were sent again, in all {} came; \
         path MTU {}, MSS {}, back-off {}",
        info.tcpi_bytes_acked,
        info.tcpi_bytes_received,
        info.tcpi_total_retrans,
        info.tcpi_data_segs_out,
        info.tcpi_segs_in,
        info.tcpi_pmtu,
        info.tcpi_snd_mss,
        info.tcpi_backoff,
    ))
}

fn info(socket: &impl AsFd) -> Result<libc::tcp_info> {
    // SAFETY: an all-zero tcp_info is a valid value of that plain C struct.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    let socket = socket.as_fd().as_raw_fd();
    // SAFETY: the buffer is as long as `length`.
    let result = unsafe {
        libc::getsockopt(socket, libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut info).cast(), &raw mut length)
    };
    ensure!(result == 0, io::Error::last_os_error());
    Ok(info)
}

/// The retransmitted segments of all connections since the namespace exists (TcpRetransSegs).
pub fn in_namespace(namespace: &Namespace) -> Result<u64> {
    // /proc/net is that of the process; this one is that of the thread that entered the namespace.
    let snmp = namespace.run(|| fs::read_to_string("/proc/thread-self/net/snmp"))?;
    let mut lines = snmp.lines().filter_map(|line| line.strip_prefix("Tcp: "));
    let (names, values) = (lines.next().context("no Tcp in snmp")?, lines.next().context("no Tcp values")?);
    let mut pairs = names.split(' ').zip(values.split(' '));
    let (_, value) = pairs.find(|(name, _)| *name == "RetransSegs").context("no RetransSegs in snmp")?;
    Ok(value.parse()?)
}
