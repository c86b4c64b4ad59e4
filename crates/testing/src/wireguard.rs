//! Keys and peers of WireGuard devices, set by generic netlink as `wg set` would set them.

use std::fmt::Debug;
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};
use netlink_packet_core::{Emitable, ParseableParametrized};
use netlink_packet_generic::ctrl::nlas::GenlCtrlAttrs;
use netlink_packet_generic::ctrl::{GenlCtrl, GenlCtrlCmd};
use netlink_packet_generic::{GenlFamily, GenlHeader, GenlMessage};
use netlink_packet_wireguard::{
    WireguardAddressFamily, WireguardAllowedIp, WireguardAllowedIpAttr, WireguardAttribute, WireguardCmd,
    WireguardMessage, WireguardPeer, WireguardPeerAttribute,
};
use traffic_policy_dataplane::node::netlink::{Connection, Message, protocols::NETLINK_GENERIC};

use crate::netns::Namespace;

/// A public or private key.
pub type Key = [u8; WireguardAttribute::WG_KEY_LEN];

/// The other end of a tunnel.
#[derive(Clone, Debug)]
pub struct Peer {
    pub key: Key,
    /// The outer address, on which the peer listens.
    pub endpoint: SocketAddr,
    /// Networks behind the peer: packets to them are sent to it, and it may send from them.
    pub allowed: Vec<(IpAddr, u8)>,
}

/// Gives a device its private key, for which any bytes will do, and the port on which it listens.
pub fn start(namespace: &Namespace, device: &str, key: Key, port: u16) -> Result<()> {
    set(namespace, device, [WireguardAttribute::PrivateKey(key), WireguardAttribute::ListenPort(port)])
}

/// Adds a peer, or gives an existing one this endpoint and these networks in addition to its own.
pub fn add_peer(namespace: &Namespace, device: &str, peer: &Peer) -> Result<()> {
    let allowed = peer.allowed.iter().map(|(address, length)| {
        let family =
            if address.is_ipv4() { WireguardAddressFamily::Ipv4 } else { WireguardAddressFamily::Ipv6 };
        WireguardAllowedIp(vec![
            WireguardAllowedIpAttr::Family(family),
            WireguardAllowedIpAttr::IpAddr(*address),
            WireguardAllowedIpAttr::Cidr(*length),
        ])
    });
    let peer = WireguardPeer(vec![
        WireguardPeerAttribute::PublicKey(peer.key),
        WireguardPeerAttribute::Endpoint(peer.endpoint),
        WireguardPeerAttribute::AllowedIps(allowed.collect()),
    ]);
    set(namespace, device, [WireguardAttribute::Peers(vec![peer])])
}

/// The public key that the kernel derives from the private one.
pub fn public_key(namespace: &Namespace, device: &str) -> Result<Key> {
    namespace.run(|| {
        let (mut generic, family) = wireguard()?;
        let answer = generic.dump(family, &message(WireguardCmd::GetDevice, device, []))?;
        let device: WireguardMessage = first(&answer)?;
        let key = device.attributes.into_iter().find_map(|attribute| match attribute {
            WireguardAttribute::PublicKey(key) => Some(key),
            _ => None,
        });
        key.context("the kernel tells no public key")
    })
}

fn set(
    namespace: &Namespace,
    device: &str,
    attributes: impl IntoIterator<Item = WireguardAttribute> + Send,
) -> Result<()> {
    namespace.run(|| {
        let (mut generic, family) = wireguard()?;
        generic.request(family, 0, &message(WireguardCmd::SetDevice, device, attributes))?;
        Ok(())
    })
}

fn message(
    cmd: WireguardCmd,
    device: &str,
    attributes: impl IntoIterator<Item = WireguardAttribute>,
) -> Vec<u8> {
    let name = WireguardAttribute::IfName(device.to_owned());
    bytes(WireguardMessage { cmd, attributes: [name].into_iter().chain(attributes).collect() })
}

fn first<F: ParseableParametrized<[u8], GenlHeader> + Debug>(answer: &[Message]) -> Result<F> {
    let Message { kind, payload } = answer.first().context("the kernel tells nothing")?;
    Ok(GenlMessage::parse_with_param(payload.as_slice(), *kind)?.payload)
}

fn bytes<F: GenlFamily + Emitable + Debug>(payload: F) -> Vec<u8> {
    let message = GenlMessage::from_payload(payload);
    let mut bytes = vec![0; message.buffer_len()];
    message.emit(&mut bytes);
    bytes
}

/// Opens a connection, and returns it with the number of the family.
fn wireguard() -> Result<(Connection, u16)> {
    let mut generic = Connection::open(NETLINK_GENERIC)?;
    let name = GenlCtrlAttrs::FamilyName(WireguardMessage::family_name().to_owned());
    let question = GenlCtrl { cmd: GenlCtrlCmd::GetFamily, nlas: vec![name] };
    let answer = generic.request(question.family_id(), 0, &bytes(question));
    let control: GenlCtrl = first(&answer.context("this kernel has no WireGuard")?)?;
    let id = control.nlas.into_iter().find_map(|attribute| match attribute {
        GenlCtrlAttrs::FamilyId(id) => Some(id),
        _ => None,
    });
    Ok((generic, id.context("the kernel tells no number of WireGuard")?))
}
