//! Listening sockets of this network namespace, and the processes that hold them.

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use traffic_policy_cluster::model::Protocol;

/// A listening TCP or SCTP socket, or a UDP socket without a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Listener {
    pub(super) protocol: Protocol,
    pub(super) local: SocketAddr,
    pub(super) holder: Option<Holder>,
}

/// Process id and name (at most 15 bytes).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Holder {
    pub(super) process: u32,
    pub(super) name: String,
}

impl Listener {
    /// Returns the holder as `nginx (process 12)`, or what is known of it.
    pub(super) fn held_by(&self) -> String {
        self.holder.as_ref().map_or_else(
            || "a process that is not visible here".to_owned(),
            |holder| format!("{} (process {})", holder.name, holder.process),
        )
    }

    /// Whether listening on `address` would fail because of this socket.
    pub(super) fn takes(&self, address: SocketAddr) -> bool {
        let (held, wanted) = (self.local.ip().to_canonical(), address.ip().to_canonical());
        // The unspecified IPv6 address covers both families; a request for the IPv4 one is opened
        // for both.
        let all = held.is_unspecified() && (held.is_ipv6() || wanted.is_ipv4()) || wanted.is_unspecified();
        self.protocol == Protocol::Tcp && self.local.port() == address.port() && (all || held == wanted)
    }
}

/// Reads all listeners; a table that the kernel does not have (IPv6) yields none.
pub(super) fn read() -> Vec<Listener> {
    let mut found = Vec::new();
    for (table, protocol) in
        [("tcp", Protocol::Tcp), ("tcp6", Protocol::Tcp), ("udp", Protocol::Udp), ("udp6", Protocol::Udp)]
    {
        let text = fs::read_to_string(format!("/proc/self/net/{table}")).unwrap_or_default();
        found.extend(text.lines().skip(1).filter_map(|line| listener(line, protocol)));
    }
    // The file does not exist before the kernel's module is loaded.
    let text = fs::read_to_string("/proc/self/net/sctp/eps").unwrap_or_default();
    found.extend(text.lines().skip(1).flat_map(endpoints));
    let holders = if found.is_empty() { BTreeMap::new() } else { holders() };
    found
        .into_iter()
        .map(|(local, protocol, inode)| Listener { protocol, local, holder: holders.get(&inode).cloned() })
        .collect()
}

/// TCP states of net/tcp_states.h: LISTEN, and CLOSE, which is UDP's state without a peer.
const LISTEN: &str = "0A";
const CLOSE: &str = "07";

/// Parses a line of /proc/net/tcp or udp, with the columns: number, local address, remote address,
/// state, queues, timer, retransmissions, user, time-out, inode.
fn listener(line: &str, protocol: Protocol) -> Option<(SocketAddr, Protocol, u64)> {
    let fields: Vec<_> = line.split_whitespace().collect();
    let wanted = if protocol == Protocol::Tcp { LISTEN } else { CLOSE };
    if *fields.get(3)? != wanted {
        return None;
    }
    let (address, port) = fields.get(1)?.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    // The words are in network byte order, each printed as a number of the machine.
    let words: Option<Vec<[u8; 4]>> = (0..address.len() / 8)
        .map(|at| Some(u32::from_str_radix(address.get(at * 8..at * 8 + 8)?, 16).ok()?.to_ne_bytes()))
        .collect();
    let address: IpAddr = match words?.concat().as_slice() {
        bytes @ [_, _, _, _] => IpAddr::V4(Ipv4Addr::from(*bytes.first_chunk::<4>()?)),
        bytes => IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?)),
    };
    (port != 0).then_some((SocketAddr::new(address, port), protocol, fields.get(9)?.parse().ok()?))
}

/// Parses a line of /proc/net/sctp/eps (`sctp_eps_seq_show` in net/sctp/proc.c), with the columns:
/// two pointers, kind of socket, its state, hash bucket, local port, user, inode, and then its
/// addresses as text. Returns none if the socket does not listen.
fn endpoints(line: &str) -> Vec<(SocketAddr, Protocol, u64)> {
    let fields: Vec<_> = line.split_whitespace().collect();
    let [_, _, _, "10", _, port, _, inode, addresses @ ..] = fields.as_slice() else { return Vec::new() };
    let (Ok(port @ 1..), Ok(inode)) = (port.parse(), inode.parse()) else { return Vec::new() };
    let addresses = addresses.iter().filter_map(|address| address.parse().ok());
    addresses.map(|address: IpAddr| (SocketAddr::new(address, port), Protocol::Sctp, inode)).collect()
}

/// Returns the process of each socket's inode, as far as /proc shows the open files.
fn holders() -> BTreeMap<u64, Holder> {
    let mut holders = BTreeMap::new();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    for process in processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()) {
        let files = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
        let sockets: Vec<u64> = files
            .filter_map(|file| {
                let link = fs::read_link(file.path()).ok()?;
                link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
            })
            .collect();
        if sockets.is_empty() {
            continue;
        }
        let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
        let name = name.trim_end().to_owned();
        for inode in sockets {
            // A child that inherited the socket usually has a larger process id.
            let holder = holders.entry(inode).or_insert_with(|| Holder { process, name: name.clone() });
            if process < holder.process {
                *holder = Holder { process, name: name.clone() };
            }
        }
    }
    holders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_understood() {
        let line = |text: &str, protocol| {
            listener(text, protocol).map(|(local, _, inode)| (local.to_string(), inode))
        };
        let tcp = "   0: 0100007F:2795 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1";
        assert_eq!(line(tcp, Protocol::Tcp), Some(("127.0.0.1:10133".into(), 4711)));
        assert_eq!(line(&tcp.replace(" 0A ", " 01 "), Protocol::Tcp), None, "a connection");
        let tcp6 = tcp.replace("0100007F", "B80D0120000000000000000001000000");
        assert_eq!(line(&tcp6, Protocol::Tcp), Some(("[2001:db8::1]:10133".into(), 4711)));
        assert_eq!(line(&tcp.replace(" 0A ", " 07 "), Protocol::Udp), Some(("127.0.0.1:10133".into(), 4711)));
        assert_eq!(line("", Protocol::Tcp), None);
    }

    #[test]
    fn lines_of_sctp_are_understood() {
        let line = |text: &str| -> Vec<_> {
            endpoints(text).into_iter().map(|(local, _, inode)| (local.to_string(), inode)).collect()
        };
        let two = "0000000000000000 0000000000000000 2   10  29   31000     0 4711 192.0.2.1 192.0.2.2 ";
        assert_eq!(line(two), [("192.0.2.1:31000".into(), 4711), ("192.0.2.2:31000".into(), 4711)]);
        let ipv6 = two.replace("192.0.2.1 192.0.2.2", "2001:0db8:0000:0000:0000:0000:0000:0001");
        assert_eq!(line(&ipv6), [("[2001:db8::1]:31000".into(), 4711)]);
        assert_eq!(line(&two.replace(" 10 ", " 7 ")), [], "it does not listen");
        assert_eq!(line(" ENDPT     SOCK   STY SST HBKT LPORT   UID INODE LADDRS"), []);
    }

    #[test]
    fn conflicts_of_addresses() {
        let listener =
            |local: &str| Listener { protocol: Protocol::Tcp, local: local.parse().unwrap(), holder: None };
        let wanted = |address: &str| address.parse().unwrap();
        assert!(listener("[::]:10256").takes(wanted("0.0.0.0:10256")));
        assert!(listener("127.0.0.1:10249").takes(wanted("127.0.0.1:10249")));
        assert!(listener("0.0.0.0:10249").takes(wanted("127.0.0.1:10249")));
        assert!(listener("[::]:10249").takes(wanted("127.0.0.1:10249")));
        assert!(!listener("0.0.0.0:10249").takes(wanted("[::1]:10249")));
        assert!(!listener("192.0.2.1:10249").takes(wanted("127.0.0.1:10249")));
        assert!(!listener("0.0.0.0:10250").takes(wanted("127.0.0.1:10249")));
    }
}
