//! Keys and peers of WireGuard devices, set by generic netlink (linux/wireguard.h) as `wg set`
//! would set them.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};
use traffic_policy_dataplane::node::netlink::{Connection, attribute, find};

use crate::netns::Namespace;

// linux/genetlink.h
const CTRL: u16 = 16;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
/// `struct genlmsghdr`.
const HEADER: usize = 4;
const NLA_F_NESTED: u16 = 0x8000;

const GET_DEVICE: u8 = 0;
const SET_DEVICE: u8 = 1;
const DEVICE_NAME: u16 = 2;
const DEVICE_PRIVATE_KEY: u16 = 3;
const DEVICE_PUBLIC_KEY: u16 = 4;
const DEVICE_LISTEN_PORT: u16 = 6;
const DEVICE_PEERS: u16 = 8;
const PEER_PUBLIC_KEY: u16 = 1;
const PEER_ENDPOINT: u16 = 4;
const PEER_ALLOWED_IPS: u16 = 9;
const ALLOWED_FAMILY: u16 = 1;
const ALLOWED_ADDRESS: u16 = 2;
const ALLOWED_LENGTH: u16 = 3;

/// The other end of a tunnel.
#[derive(Clone, Debug)]
pub struct Peer {
    /// The public key.
    pub key: Vec<u8>,
    /// The outer address, on which the peer listens.
    pub endpoint: SocketAddr,
    /// Networks behind the peer: packets to them are sent to it, and it may send from them.
    pub allowed: Vec<(IpAddr, u8)>,
}

/// Gives a device its private key, for which any bytes will do, and the port on which it listens.
///
/// # Errors
/// The kernel has no WireGuard, or the device does not exist.
pub fn start(namespace: &Namespace, device: &str, key: [u8; 32], port: u16) -> Result<()> {
    let key = attribute(DEVICE_PRIVATE_KEY, &key);
    let port = attribute(DEVICE_LISTEN_PORT, &port.to_ne_bytes());
    set(namespace, device, &[key, port].concat())
}

/// Adds a peer, or gives an existing one this endpoint and these networks in addition to its own.
///
/// # Errors
/// The same as those of [`start`].
pub fn add_peer(namespace: &Namespace, device: &str, peer: &Peer) -> Result<()> {
    let allowed: Vec<u8> =
        peer.allowed.iter().flat_map(|(address, length)| network(*address, *length)).collect();
    let peer = [
        attribute(PEER_PUBLIC_KEY, &peer.key),
        attribute(PEER_ENDPOINT, &socket_address(peer.endpoint)),
        attribute(PEER_ALLOWED_IPS | NLA_F_NESTED, &allowed),
    ];
    let peer = attribute(NLA_F_NESTED, &peer.concat());
    set(namespace, device, &attribute(DEVICE_PEERS | NLA_F_NESTED, &peer))
}

/// The public key that the kernel derives from the private one.
///
/// # Errors
/// The device has no key yet.
pub fn public_key(namespace: &Namespace, device: &str) -> Result<Vec<u8>> {
    namespace.run(|| {
        let (mut generic, family) = wireguard()?;
        let answer = generic.dump(family, &message(GET_DEVICE, device, &[]))?;
        let key = answer.first().and_then(|message| find(message.payload.get(HEADER..)?, DEVICE_PUBLIC_KEY));
        Ok(key.context("the kernel tells no public key")?.to_vec())
    })
}

fn network(address: IpAddr, length: u8) -> Vec<u8> {
    let (family, bytes) = match address {
        IpAddr::V4(address) => (libc::AF_INET, address.octets().to_vec()),
        IpAddr::V6(address) => (libc::AF_INET6, address.octets().to_vec()),
    };
    let facts = [
        attribute(ALLOWED_FAMILY, &(family as u16).to_ne_bytes()),
        attribute(ALLOWED_ADDRESS, &bytes),
        attribute(ALLOWED_LENGTH, &[length]),
    ];
    attribute(NLA_F_NESTED, &facts.concat())
}

/// The address as a `struct sockaddr_in` or `sockaddr_in6`.
fn socket_address(address: SocketAddr) -> Vec<u8> {
    let port = address.port().to_be_bytes();
    let family = |family: i32| (family as u16).to_ne_bytes();
    match address.ip() {
        IpAddr::V4(ip) => [&family(libc::AF_INET)[..], &port, &ip.octets(), &[0; 8]].concat(),
        IpAddr::V6(ip) => [&family(libc::AF_INET6)[..], &port, &[0; 4], &ip.octets(), &[0; 4]].concat(),
    }
}

fn set(namespace: &Namespace, device: &str, attributes: &[u8]) -> Result<()> {
    namespace.run(|| {
        let (mut generic, family) = wireguard()?;
        generic.request(family, 0, &message(SET_DEVICE, device, attributes))?;
        Ok(())
    })
}

fn message(command: u8, device: &str, attributes: &[u8]) -> Vec<u8> {
    let name = attribute(DEVICE_NAME, &[device.as_bytes(), &[0]].concat());
    [&[command, 1, 0, 0], &name[..], attributes].concat()
}

/// Opens a connection, and returns it with the number of the family.
fn wireguard() -> Result<(Connection, u16)> {
    let mut generic = Connection::open(libc::NETLINK_GENERIC as isize)?;
    let name = attribute(CTRL_ATTR_FAMILY_NAME, b"wireguard\0");
    let question = [&[CTRL_CMD_GETFAMILY, 1, 0, 0], &name[..]].concat();
    let answer = generic.request(CTRL, 0, &question).context("this kernel has no WireGuard")?;
    let id = answer.first().and_then(|message| find(message.payload.get(HEADER..)?, CTRL_ATTR_FAMILY_ID));
    let id = id.and_then(|id| id.first_chunk()).context("the kernel tells no number of WireGuard")?;
    Ok((generic, u16::from_ne_bytes(*id)))
}
