//! Packet sockets (AF_PACKET): whole frames of one device.

use anyhow::Result;
use socket2::{Domain, Socket, Type};
use traffic_policy_dataplane::node::direct_probe::station;

use crate::netlink;

/// Opens a socket that receives nothing until it is bound.
pub fn unbound() -> Result<Socket> {
    Ok(Socket::new(Domain::PACKET, Type::RAW, None)?)
}

/// Opens a socket at a device of the calling thread's namespace, for frames of a protocol; with
/// protocol 0 it receives none.
pub fn open(device: &str, protocol: u16) -> Result<Socket> {
    let socket = unbound()?;
    bind(&socket, device, protocol)?;
    Ok(socket)
}

/// Binds a socket to a device of the calling thread's namespace.
pub fn bind(socket: &Socket, device: &str, protocol: u16) -> Result<()> {
    let address = station::of(netlink::index(device)?, [0; 6], protocol)?;
    Ok(socket.bind(&address)?)
}
