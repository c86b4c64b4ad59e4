//! Counts of TCP by the kernel: retransmitted and lost segments of a connection or a namespace, its
//! resets, and the `tcp_info` of a connection as text.
//!
//! A segment that was retransmitted is not lost if the other end says by a duplicate SACK (RFC
//! 2883) that it came twice: it was late, or its acknowledgement was. So an acknowledgement without
//! data that was lost does not count.

use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;
use std::{fs, io};

use anyhow::{Context, Result, ensure};
use nix::libc;

use crate::netns::Namespace;

/// The segments of one connection that this end sent and that were lost (tcpi_total_retrans,
/// tcpi_dsack_dups).
pub(super) fn lost(socket: &impl AsFd) -> Result<u32> {
    let info = info(socket)?;
    Ok(info.tcpi_total_retrans.saturating_sub(info.tcpi_dsack_dups))
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
    /// The time after which it sends a segment again that was not acknowledged.
    pub timeout: Duration,
}

/// Returns how far a connection is.
pub fn state(socket: &impl AsFd) -> Result<State> {
    let info = info(socket)?;
    Ok(State {
        acknowledged: info.tcpi_bytes_acked,
        received: info.tcpi_bytes_received,
        window: u64::from(info.tcpi_snd_cwnd) * u64::from(info.tcpi_snd_mss),
        is_unanswered: info.tcpi_backoff > 0,
        timeout: Duration::from_micros(info.tcpi_rto.into()),
    })
}

/// Returns the `tcp_info` of a connection, open or failed, as one line: bytes and segments of each
/// direction, retransmissions, path MTU and MSS in bytes, and the number of back-offs.
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

/// The segments that were lost of all connections since the namespace exists (TcpRetransSegs,
/// TcpExtTCPDSACKRecvSegs).
///
/// # Errors
/// The namespace cannot be entered, or the kernel does not count these.
pub fn lost_in_namespace(namespace: &Namespace) -> Result<u64> {
    let retransmitted = counter(namespace, "snmp", "Tcp: ", "RetransSegs")?;
    let duplicate = counter(namespace, "netstat", "TcpExt: ", "TCPDSACKRecvSegs")?;
    Ok(retransmitted.saturating_sub(duplicate))
}

/// Lets the connections that are opened in a namespace from now on wait at least this long for an
/// acknowledgement before they send a segment again (tcp_rto_min_us, 200 ms by default): a segment
/// that is late because the machine is busy is not taken for one that was lost. Not every duplicate
/// is reported by a SACK: a connection in TIME_WAIT sends none. An accepted connection has the time
/// of its listener, which must be opened later, too.
///
/// Before Linux 6.11, which lacks the setting, this has no effect.
pub fn wait_before_sending_again(namespace: &Namespace, least: Duration) -> Result<()> {
    let path = "/proc/sys/net/ipv4/tcp_rto_min_us";
    match namespace.run(|| fs::write(path, least.as_micros().to_string())) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).context(path),
        _ => Ok(()),
    }
}

/// The segments with RST that the kernel of a namespace has sent since it exists (TcpOutRsts).
///
/// # Errors
/// The namespace cannot be entered, or the kernel does not count these.
pub fn resets_of_namespace(namespace: &Namespace) -> Result<u64> {
    counter(namespace, "snmp", "Tcp: ", "OutRsts")
}

/// Reads one counter of a file that has two lines for each protocol, of names and of values.
fn counter(namespace: &Namespace, file: &str, protocol: &str, counter: &str) -> Result<u64> {
    // /proc/net is that of the process; this one is that of the thread that entered the namespace.
    let text = namespace.run(|| fs::read_to_string(format!("/proc/thread-self/net/{file}")))?;
    let mut lines = text.lines().filter_map(|line| line.strip_prefix(protocol));
    let mut line = || lines.next().with_context(|| format!("no {protocol}in {file}"));
    let (names, values) = (line()?, line()?);
    let mut pairs = names.split(' ').zip(values.split(' '));
    let (_, value) =
        pairs.find(|(name, _)| *name == counter).with_context(|| format!("no {counter} in {file}"))?;
    Ok(value.parse()?)
}
