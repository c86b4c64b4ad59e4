//! WireGuard between two namespaces: what `wg set` would do, by generic netlink (linux/wireguard.h).

use std::net::Ipv4Addr;

use anyhow::{Context, Result};
use traffic_policy_agent::node::netlink::{Connection, attribute, find};
use traffic_policy_testing::netns::Namespace;

use crate::wires::ip;

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

const PORT: u16 = 51820;

/// Makes the devices `name` at both ends, each with all addresses behind the other. The addresses are the outer ones.
pub fn join(name: &str, ends: [(&Namespace, Ipv4Addr); 2]) -> Result<()> {
    let mut keys = Vec::new();
    for (number, (namespace, _)) in (1..).zip(ends) {
        ip(Some(namespace), &["link", "add", name, "type", "wireguard"])?;
        // Any bytes are a private key; the kernel tells the public one.
        let own = attribute(DEVICE_PRIVATE_KEY, &[number; 32]);
        let port = attribute(DEVICE_LISTEN_PORT, &PORT.to_ne_bytes());
        set(namespace, name, &[own, port].concat())?;
        keys.push(public_key(namespace, name)?);
    }
    for ((namespace, _), ((_, other), key)) in
        ends.into_iter().zip(ends.into_iter().rev().zip(keys.into_iter().rev()))
    {
        // `struct sockaddr_in`.
        let family = (libc::AF_INET as u16).to_ne_bytes();
        let endpoint = [&family[..], &PORT.to_be_bytes(), &other.octets(), &[0; 8]].concat();
        let everything = [(libc::AF_INET, 4), (libc::AF_INET6, 16)].map(|(family, bytes)| {
            let allowed = [
                attribute(ALLOWED_FAMILY, &(family as u16).to_ne_bytes()),
                attribute(ALLOWED_ADDRESS, &vec![0; bytes]),
                attribute(ALLOWED_LENGTH, &[0]),
            ];
            attribute(NLA_F_NESTED, &allowed.concat())
        });
        let peer = [
            attribute(PEER_PUBLIC_KEY, &key),
            attribute(PEER_ENDPOINT, &endpoint),
            attribute(PEER_ALLOWED_IPS | NLA_F_NESTED, &everything.concat()),
        ];
        let peer = attribute(NLA_F_NESTED, &peer.concat());
        set(namespace, name, &attribute(DEVICE_PEERS | NLA_F_NESTED, &peer))?;
        ip(Some(namespace), &["link", "set", name, "up"])?;
    }
    Ok(())
}

fn set(namespace: &Namespace, device: &str, attributes: &[u8]) -> Result<()> {
    namespace.run(|| {
        let (mut generic, family) = wireguard()?;
        generic.request(family, 0, &message(SET_DEVICE, device, attributes))?;
        Ok(())
    })
}

fn public_key(namespace: &Namespace, device: &str) -> Result<Vec<u8>> {
    namespace.run(|| {
        let (mut generic, family) = wireguard()?;
        let answer = generic.dump(family, &message(GET_DEVICE, device, &[]))?;
        let key = answer.first().and_then(|message| find(message.payload.get(HEADER..)?, DEVICE_PUBLIC_KEY));
        Ok(key.context("the kernel tells no public key")?.to_vec())
    })
}

fn message(command: u8, device: &str, attributes: &[u8]) -> Vec<u8> {
    let name = attribute(DEVICE_NAME, &[device.as_bytes(), &[0]].concat());
    [&[command, 1, 0, 0], &name[..], attributes].concat()
}

/// A connection, and the number of the family.
fn wireguard() -> Result<(Connection, u16)> {
    let mut generic = Connection::open(libc::NETLINK_GENERIC as isize)?;
    let name = attribute(CTRL_ATTR_FAMILY_NAME, b"wireguard\0");
    let question = [&[CTRL_CMD_GETFAMILY, 1, 0, 0], &name[..]].concat();
    let answer = generic.request(CTRL, 0, &question).context("this kernel has no WireGuard")?;
    let id = answer.first().and_then(|message| find(message.payload.get(HEADER..)?, CTRL_ATTR_FAMILY_ID));
    let id = id.and_then(|id| id.first_chunk()).context("the kernel tells no number of WireGuard")?;
    Ok((generic, u16::from_ne_bytes(*id)))
}
