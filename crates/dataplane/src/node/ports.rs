//! The local ports of this network namespace's TCP and UDP sockets.

use std::{collections::BTreeSet, fs, io};

use anyhow::{Context, Result};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;

use super::{
    netlink::Connection,
    sock_diag::{
        AF_INET, AF_INET6, IPPROTO_TCP, IPPROTO_UDP, SOCK_DIAG_BY_FAMILY, SocketId, StateFlags, request,
        socket_id,
    },
};

/// Returns the local ports, from sock_diag or, if the kernel has none, from the text of /proc. It
/// blocks: a node may have hundreds of thousands of sockets.
pub fn bound_ports() -> Result<BTreeSet<u16>> {
    by_diag().or_else(|error| {
        tracing::debug!("sock_diag does not tell the ports of sockets: {error}");
        by_proc()
    })
}

fn by_diag() -> io::Result<BTreeSet<u16>> {
    let mut diag = Connection::open(NETLINK_SOCK_DIAG)?;
    let mut ports = BTreeSet::new();
    // Newer kernels have states that the library has no names for, such as that of a bound socket
    // that is neither connected nor listening.
    let all = StateFlags::from_bits_retain(u32::MAX);
    for family in [AF_INET, AF_INET6] {
        for protocol in [IPPROTO_TCP, IPPROTO_UDP] {
            let request = request(family, protocol, all.clone(), SocketId::new_v4());
            let sockets = diag.dump(SOCK_DIAG_BY_FAMILY, &request)?;
            ports.extend(sockets.iter().filter_map(|socket| Some(socket_id(&socket.payload)?.source_port)));
        }
    }
    // The port of sockets that were never bound.
    ports.remove(&0);
    Ok(ports)
}

fn by_proc() -> Result<BTreeSet<u16>> {
    let mut ports = BTreeSet::new();
    for table in ["tcp", "tcp6", "udp", "udp6"] {
        let path = format!("/proc/self/net/{table}");
        match fs::read_to_string(&path) {
            Ok(text) => ports.extend(local_ports(&text)),
            // A kernel without IPv6 has no such table.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(|| format!("{path} cannot be read")),
        }
    }
    Ok(ports)
}

/// Parses the second column, after the colon, as hexadecimal.
fn local_ports(table: &str) -> impl Iterator<Item = u16> {
    table.lines().skip(1).filter_map(|line| {
        let address = line.split_whitespace().nth(1)?;
        u16::from_str_radix(address.rsplit_once(':')?.1, 16).ok()
    })
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream, UdpSocket};

    use super::*;

    #[test]
    fn proc_tables_are_understood() {
        let table = "  sl  local_address rem_address   st\n   0: 0100007F:2795 00000000:0000 0A\n   1: 00000000000000000000000001000000:0016 0:0 0A\n";
        assert_eq!(local_ports(table).collect::<Vec<_>>(), [0x2795, 22]);
    }

    #[test]
    fn listening_connected_and_udp_sockets_are_found_both_ways() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let udp = UdpSocket::bind("[::1]:0").or_else(|_| UdpSocket::bind("127.0.0.1:0")).unwrap();
        let wanted = [listener.local_addr(), client.local_addr(), udp.local_addr()];
        for found in [by_diag().unwrap(), by_proc().unwrap()] {
            for address in &wanted {
                assert!(found.contains(&address.as_ref().unwrap().port()), "{address:?}");
            }
        }
    }
}
