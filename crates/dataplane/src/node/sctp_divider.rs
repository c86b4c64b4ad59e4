//! The pair of devices (veth) in which the kernel divides aggregates of SCTP packets: one of them
//! cannot send aggregates, so each of their packets arrives at the other one by itself.

use std::io;

use netlink_sys::protocols::NETLINK_ROUTE;

use super::{
    ethtool,
    netlink::{Connection, attribute, find as value, text},
};

/// The names of the device that divides, and of its peer.
pub const NAMES: [&str; 2] = ["tp-sctp0", "tp-sctp1"];
/// The alias by which the agent knows its own device.
const ALIAS: &str = "traffic-policy: divides aggregates of SCTP packets";
/// The largest MTU of a veth in bytes (ETH_MAX_MTU): what the pods' devices let through fits.
const MTU: u32 = 65_535;
/// The offloads that the first device lacks (`ethtool -k`). Without the second one packets arrive
/// with their checksum: the kernel would write it into an answer to one (`skb_crc32c_csum_help`).
const OFFLOADS: [&str; 2] = ["tx-sctp-segmentation", "tx-checksum-sctp"];

// linux/netlink.h, linux/rtnetlink.h, linux/if.h, linux/if_link.h, linux/veth.h
const NLM_F_EXCL: u16 = 0x200;
const NLM_F_CREATE: u16 = 0x400;
const NLA_F_NESTED: u16 = 0x8000;
const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_GETLINK: u16 = 18;
const RTM_SETLINK: u16 = 19;
const IFF_UP: u32 = 0x1;
const IFF_NOARP: u32 = 0x80;
const IFF_LOWER_UP: u32 = 0x1_0000;
/// The flags of a device that is up, and whose peer is.
const BOTH_UP: u32 = IFF_UP | IFF_LOWER_UP;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_LINK: u16 = 5;
const IFLA_LINKINFO: u16 = 18;
const IFLA_IFALIAS: u16 = 20;
const IFLA_AF_SPEC: u16 = 26;
const IFLA_LINK_NETNSID: u16 = 37;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const VETH_INFO_PEER: u16 = 1;
const AF_INET6: u16 = 10;
const IFLA_INET6_ADDR_GEN_MODE: u16 = 8;
const IN6_ADDR_GEN_MODE_NONE: u8 = 1;
/// `struct ifinfomsg`.
const HEADER: usize = 16;

/// The numbers of both devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// The device that divides what it is to send.
    pub divider: u32,
    /// Its peer, where the packets arrive.
    pub peer: u32,
}

/// Returns the pair of this network namespace; `None` if there is none.
///
/// # Errors
/// A device of another has its name, or the kernel refuses.
pub fn find() -> io::Result<Option<Pair>> {
    let Some(found) = Found::named(NAMES[0])? else { return Ok(None) };
    if found.alias != ALIAS {
        let what = format!("the device {} is not the agent's: rename or remove it", NAMES[0]);
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
    }
    let whole =
        found.passes && !ethtool::offloads(found.index)?.iter().any(|on| OFFLOADS.contains(&on.as_str()));
    match found.peer {
        Some(peer) if whole => Ok(Some(Pair { divider: found.index, peer })),
        // An agent was killed while it made the pair, or somebody has moved or shut down its peer.
        _ => remove().map(|()| None),
    }
}

/// Makes the pair.
///
/// # Errors
/// One of the names is taken, or the kernel refuses: it has no veth, for one. Nothing is left then.
pub fn create() -> io::Result<Pair> {
    let mut routes = Connection::open(NETLINK_ROUTE)?;
    let named = |name: &str| {
        [attribute(IFLA_IFNAME, &[name.as_bytes(), &[0]].concat()), attribute(IFLA_MTU, &MTU.to_ne_bytes())]
            .concat()
    };
    let peer = attribute(VETH_INFO_PEER | NLA_F_NESTED, &[header(0, 0), named(NAMES[1])].concat());
    let kind = attribute(IFLA_INFO_KIND, b"veth");
    let info = [kind, attribute(IFLA_INFO_DATA | NLA_F_NESTED, &peer)].concat();
    let info = attribute(IFLA_LINKINFO | NLA_F_NESTED, &info);
    let request = [header(0, 0), named(NAMES[0]), info].concat();
    routes.request(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, &request)?;
    let made = complete(&mut routes);
    if made.is_err() {
        // The first error says why.
        let _ = delete(&mut routes, NAMES[0]);
    }
    made
}

/// Removes the agent's pair, if there is one.
///
/// # Errors
/// The kernel refuses.
pub fn remove() -> io::Result<()> {
    match Found::named(NAMES[0])? {
        Some(found) if found.alias == ALIAS => delete(&mut Connection::open(NETLINK_ROUTE)?, NAMES[0]),
        _ => Ok(()),
    }
}

/// Sets up a pair that has been made. It is up last: see [`find`].
fn complete(routes: &mut Connection) -> io::Result<Pair> {
    let missing = || io::Error::from(io::ErrorKind::NotFound);
    let found = Found::named(NAMES[0])?.ok_or_else(missing)?;
    let pair = Pair { divider: found.index, peer: found.peer.ok_or_else(missing)? };
    let alias = [header(pair.divider, 0), attribute(IFLA_IFALIAS, ALIAS.as_bytes())].concat();
    routes.request(RTM_SETLINK, 0, &alias)?;
    // Without an address neither device sends packets of its own. A kernel without IPv6 refuses.
    let mode = attribute(IFLA_INET6_ADDR_GEN_MODE, &[IN6_ADDR_GEN_MODE_NONE]);
    let mode = attribute(IFLA_AF_SPEC | NLA_F_NESTED, &attribute(AF_INET6 | NLA_F_NESTED, &mode));
    for index in [pair.divider, pair.peer] {
        let _ = routes.request(RTM_SETLINK, 0, &[header(index, 0), mode.clone()].concat());
    }
    for offload in OFFLOADS {
        ethtool::switch_off(pair.divider, offload)?;
    }
    for index in [pair.peer, pair.divider] {
        routes.request(RTM_SETLINK, 0, &header(index, IFF_UP | IFF_NOARP))?;
    }
    Ok(pair)
}

fn delete(routes: &mut Connection, name: &str) -> io::Result<()> {
    let name = attribute(IFLA_IFNAME, &[name.as_bytes(), &[0]].concat());
    routes.request(RTM_DELLINK, 0, &[header(0, 0), name].concat()).map(drop)
}

/// Returns the fixed part of a request about a device, which is to have these flags.
fn header(index: u32, flags: u32) -> Vec<u8> {
    let mut header = vec![0; HEADER];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[8..12].copy_from_slice(&flags.to_ne_bytes());
    header[12..16].copy_from_slice(&flags.to_ne_bytes());
    header
}

/// A device with this name, as it is.
struct Found {
    index: u32,
    /// Whether it and its peer are up.
    passes: bool,
    alias: String,
    /// The other end of a pair; `None` if it is in another network namespace.
    peer: Option<u32>,
}

impl Found {
    fn named(name: &str) -> io::Result<Option<Self>> {
        let name = attribute(IFLA_IFNAME, &[name.as_bytes(), &[0]].concat());
        let request = [header(0, 0), name].concat();
        match Connection::open(NETLINK_ROUTE)?.request(RTM_GETLINK, 0, &request) {
            Ok(messages) => Ok(messages.first().and_then(|message| Self::of(&message.payload))),
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn of(payload: &[u8]) -> Option<Self> {
        let word = |bytes: &[u8]| bytes.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes));
        let attributes = payload.get(HEADER..)?;
        let peer = value(attributes, IFLA_LINK).and_then(word);
        Some(Self {
            index: word(payload.get(4..)?)?,
            passes: word(payload.get(8..)?)? & BOTH_UP == BOTH_UP,
            alias: value(attributes, IFLA_IFALIAS).map(text).unwrap_or_default(),
            peer: peer.filter(|_| value(attributes, IFLA_LINK_NETNSID).is_none()),
        })
    }
}
