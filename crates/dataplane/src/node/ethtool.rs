//! Features, offloads and channels of a device, by ethtool's generic netlink.

use std::io;

use super::netlink::{Connection, attribute, attributes, find, protocols::NETLINK_GENERIC, text};

/// The queue pairs of a device ("combined channels").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Channels {
    pub used: u32,
    pub most: u32,
}

// linux/genetlink.h
const CTRL: u16 = 16;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
// linux/ethtool_netlink.h
const BITSET_BITS: u16 = 3;
const BIT_NAME: u16 = 2;
/// `struct genlmsghdr`.
const HEADER: usize = 4;
const NLA_F_NESTED: u16 = 0x8000;

fn request(command: u8, attributes: &[u8]) -> Vec<u8> {
    [&[command, 1, 0, 0], attributes].concat()
}

fn family(generic: &mut Connection, name: &str) -> io::Result<u16> {
    let name = attribute(CTRL_ATTR_FAMILY_NAME, &[name.as_bytes(), &[0]].concat());
    let answer = generic.request(CTRL, 0, &request(CTRL_CMD_GETFAMILY, &name))?;
    let id = answer.first().and_then(|message| find(message.payload.get(HEADER..)?, CTRL_ATTR_FAMILY_ID));
    let id = id.and_then(|id| id.first_chunk()).map(|id| u16::from_ne_bytes(*id));
    id.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// Returns the XDP features of a device as linux/netdev.h numbers them; an error before Linux 6.3,
/// which does not report them.
pub fn xdp_features(index: u32) -> io::Result<u64> {
    // linux/netdev.h
    const DEV_GET: u8 = 1;
    const IFINDEX: u16 = 1;
    const XDP_FEATURES: u16 = 3;
    let mut generic = Connection::open(NETLINK_GENERIC)?;
    let netdev = family(&mut generic, "netdev")?;
    let answer = generic.request(netdev, 0, &request(DEV_GET, &attribute(IFINDEX, &index.to_ne_bytes())))?;
    let features = answer.first().and_then(|message| find(message.payload.get(HEADER..)?, XDP_FEATURES));
    let features = features.and_then(|features| features.first_chunk());
    features
        .map(|bytes| u64::from_ne_bytes(*bytes))
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// Whether a device strips VLAN tags from frames before XDP sees them: a frame for eth0.100 then
/// looks like one for eth0.
#[must_use]
pub fn strips_vlans(index: u32) -> bool {
    offloads(index).is_ok_and(|offloads| strip_vlans(&offloads))
}

pub fn strip_vlans(offloads: &[String]) -> bool {
    offloads.iter().any(|name| name == "rx-vlan-hw-parse")
}

/// Returns the offloads that are on, by the kernel's names that `ethtool -k` shows
/// (`tx-checksum-ip-generic` …).
pub fn offloads(index: u32) -> io::Result<Vec<String>> {
    // linux/ethtool_netlink.h
    const FEATURES_GET: u8 = 11;
    const FEATURES_ACTIVE: u16 = 4;
    let answer = ethtool(FEATURES_GET, index, &[])?;
    let bits =
        find(&answer, FEATURES_ACTIVE).and_then(|active| find(active, BITSET_BITS)).unwrap_or_default();
    // This set has no mask: a bit that is listed is set.
    Ok(attributes(bits).filter_map(|bit| find(bit.value(), BIT_NAME).map(text)).collect())
}

/// Switches an offload of a device off, by the kernel's name.
///
/// # Errors
/// The kernel refuses, or the device's driver has it always on.
pub fn switch_off(index: u32, offload: &str) -> io::Result<()> {
    // linux/ethtool_netlink.h
    const FEATURES_SET: u8 = 12;
    const FEATURES_WANTED: u16 = 3;
    const BITSET_BIT: u16 = 1;
    // A bit without a flag for its value is off; those that are not listed stay as they are.
    let name = attribute(BIT_NAME, &[offload.as_bytes(), &[0]].concat());
    let bits = attribute(BITSET_BITS | NLA_F_NESTED, &attribute(BITSET_BIT | NLA_F_NESTED, &name));
    ethtool(FEATURES_SET, index, &attribute(FEATURES_WANTED | NLA_F_NESTED, &bits))?;
    if offloads(index)?.iter().any(|name| name == offload) {
        return Err(io::Error::other(format!("{offload} cannot be switched off")));
    }
    Ok(())
}

/// Returns the number of queue pairs that a device uses, and the maximum.
pub fn channels(index: u32) -> io::Result<Channels> {
    // linux/ethtool_netlink.h
    const CHANNELS_GET: u8 = 17;
    const COMBINED_MAX: u16 = 5;
    const COMBINED_COUNT: u16 = 9;
    let answer = ethtool(CHANNELS_GET, index, &[])?;
    let number = |kind| {
        let value = find(&answer, kind).and_then(|value| value.first_chunk());
        value.map(|bytes| u32::from_ne_bytes(*bytes)).ok_or(io::ErrorKind::InvalidData)
    };
    Ok(Channels { used: number(COMBINED_COUNT)?, most: number(COMBINED_MAX)? })
}

/// Returns the attributes of the answer to a request about a device. `more`: the request's
/// attributes behind the one that names the device.
fn ethtool(command: u8, index: u32, more: &[u8]) -> io::Result<Vec<u8>> {
    // The header attribute of every request, from linux/ethtool_netlink.h.
    const QUESTION_HEADER: u16 = 1;
    const HEADER_DEV_INDEX: u16 = 1;
    let mut generic = Connection::open(NETLINK_GENERIC)?;
    let ethtool = family(&mut generic, "ethtool")?;
    let device = attribute(HEADER_DEV_INDEX, &index.to_ne_bytes());
    let header = attribute(QUESTION_HEADER | NLA_F_NESTED, &device);
    let answer = generic.request(ethtool, 0, &request(command, &[&header, more].concat()))?;
    let attributes = answer.first().and_then(|message| message.payload.get(HEADER..));
    Ok(attributes.unwrap_or_default().to_vec())
}
