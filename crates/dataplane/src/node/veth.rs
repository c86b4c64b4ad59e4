//! A device with its XDP program, as reported by rtnetlink, and the other end of a veth, even in
//! another network namespace, which is found by the id that this one has for it.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use netlink_sys::protocols::NETLINK_ROUTE;

use super::netlink::{Connection, Message, attribute, find, text};

/// The attributes of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    pub name: String,
    pub index: u32,
    pub mtu: u32,
    pub veth: bool,
    pub xdp: Option<Xdp>,
    /// The number of the other end, in the namespace with the id `namespace`, or in this one if
    /// that is `None`.
    other: Option<u32>,
    namespace: Option<u32>,
}

/// An XDP program on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Xdp {
    pub id: u32,
    /// Whether it is in the driver rather than in the stack.
    pub driver: bool,
}

// linux/rtnetlink.h, linux/if_link.h
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_SETLINK: u16 = 19;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_LINK: u16 = 5;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_LINK_NETNSID: u16 = 37;
const IFLA_XDP: u16 = 43;
const IFLA_TARGET_NETNSID: u16 = 46;
const IFLA_XDP_FD: u16 = 1;
const IFLA_XDP_FLAGS: u16 = 3;
const IFLA_XDP_DRV_PROG_ID: u16 = 5;
const IFLA_XDP_SKB_PROG_ID: u16 = 6;
const IFLA_XDP_EXPECTED_FD: u16 = 8;
const XDP_FLAGS_UPDATE_IF_NOEXIST: u32 = 1;
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;
const XDP_FLAGS_REPLACE: u32 = 1 << 4;
const NLA_F_NESTED: u16 = 0x8000;
/// `struct ifinfomsg`.
const HEADER: usize = 16;

impl End {
    /// Returns a device of this network namespace.
    pub fn of(index: u32) -> io::Result<Self> {
        read(&mut Connection::open(NETLINK_ROUTE)?, index, None)
    }

    /// Returns all devices of this network namespace.
    pub fn all() -> io::Result<Vec<Self>> {
        let messages = Connection::open(NETLINK_ROUTE)?.dump(RTM_GETLINK, &[0; HEADER])?;
        Ok(messages.iter().filter_map(parse).collect())
    }

    /// Returns the other end of a veth.
    ///
    /// # Errors
    /// The device is not a veth, or its other end is gone or inaccessible to this process.
    pub fn other(&self) -> io::Result<Self> {
        let other = self.other.filter(|_| self.veth).ok_or_else(unknown)?;
        read(&mut Connection::open(NETLINK_ROUTE)?, other, self.namespace)
    }

    /// Whether its other end is in another network namespace.
    pub fn other_is_elsewhere(&self) -> bool {
        self.namespace.is_some()
    }

    /// Returns the id of the other end's network namespace, if that is another one.
    pub fn other_namespace(&self) -> Option<u32> {
        self.namespace
    }
}

/// A change of the XDP program in a device's driver.
#[derive(Clone, Copy, Debug)]
pub enum Change<'a> {
    /// Attaches the program if there is none yet.
    Attach(BorrowedFd<'a>),
    /// Detaches the program if it is this one.
    Detach(BorrowedFd<'a>),
}

/// Changes the XDP program in the driver of a device. The program stays as long as the device.
///
/// # Errors
/// The current program is not the expected one, or the driver or the kernel refuses.
pub fn set_xdp(index: u32, change: Change<'_>) -> io::Result<()> {
    let (program, flags, expected) = match change {
        Change::Attach(program) => (program.as_raw_fd(), XDP_FLAGS_UPDATE_IF_NOEXIST, None),
        Change::Detach(program) => (-1, XDP_FLAGS_REPLACE, Some(program.as_raw_fd())),
    };
    let mut xdp = attribute(IFLA_XDP_FD, &program.to_ne_bytes());
    xdp.extend(attribute(IFLA_XDP_FLAGS, &(flags | XDP_FLAGS_DRV_MODE).to_ne_bytes()));
    if let Some(expected) = expected {
        xdp.extend(attribute(IFLA_XDP_EXPECTED_FD, &expected.to_ne_bytes()));
    }
    let request = [header(index), attribute(IFLA_XDP | NLA_F_NESTED, &xdp)].concat();
    Connection::open(NETLINK_ROUTE)?.request(RTM_SETLINK, 0, &request).map(drop)
}

fn header(index: u32) -> Vec<u8> {
    let mut header = vec![0; HEADER];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header
}

fn read(routes: &mut Connection, index: u32, namespace: Option<u32>) -> io::Result<End> {
    let mut request = header(index);
    if let Some(namespace) = namespace {
        request.extend(attribute(IFLA_TARGET_NETNSID, &namespace.to_ne_bytes()));
    }
    routes.request(RTM_GETLINK, 0, &request)?.iter().find_map(parse).ok_or_else(unknown)
}

fn parse(message: &Message) -> Option<End> {
    if message.kind != RTM_NEWLINK {
        return None;
    }
    let (header, attributes) = message.payload.split_at_checked(HEADER)?;
    let index = u32::from_ne_bytes(*header.get(4..)?.first_chunk()?);
    let kind = find(attributes, IFLA_LINKINFO).and_then(|info| find(info, IFLA_INFO_KIND)).map(text);
    let xdp = find(attributes, IFLA_XDP).unwrap_or_default();
    let program = |kind, driver| number(xdp, kind).filter(|id| *id != 0).map(|id| Xdp { id, driver });
    Some(End {
        name: find(attributes, IFLA_IFNAME).map(text)?,
        index,
        mtu: number(attributes, IFLA_MTU)?,
        veth: kind.as_deref() == Some("veth"),
        xdp: program(IFLA_XDP_DRV_PROG_ID, true).or_else(|| program(IFLA_XDP_SKB_PROG_ID, false)),
        other: number(attributes, IFLA_LINK).filter(|other| *other != 0),
        namespace: number(attributes, IFLA_LINK_NETNSID),
    })
}

fn unknown() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "the kernel does not tell of the other end")
}

fn number(attributes: &[u8], kind: u16) -> Option<u32> {
    find(attributes, kind)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(attributes: &[Vec<u8>]) -> Message {
        Message { kind: RTM_NEWLINK, payload: [header(7), attributes.concat()].concat() }
    }

    #[test]
    fn a_veth_with_a_program() {
        let numbers = |kind, number: u32| attribute(kind, &number.to_ne_bytes());
        let common = [
            attribute(IFLA_IFNAME, b"veth7\0"),
            numbers(IFLA_MTU, 1500),
            attribute(IFLA_LINKINFO, &attribute(IFLA_INFO_KIND, b"veth\0")),
            numbers(IFLA_LINK, 2),
            numbers(IFLA_LINK_NETNSID, 0),
        ];
        let with = |xdp: &[Vec<u8>]| {
            parse(&message(&[&common[..], &[attribute(IFLA_XDP, &xdp.concat())]].concat())).unwrap()
        };
        let end = with(&[numbers(IFLA_XDP_DRV_PROG_ID, 12)]);
        assert_eq!((&*end.name, end.index, end.mtu, end.veth), ("veth7", 7, 1500, true));
        assert_eq!(end.xdp, Some(Xdp { id: 12, driver: true }));
        // The id 0 of a namespace is valid.
        assert!(end.other_is_elsewhere() && end.other == Some(2));
        assert_eq!(with(&[numbers(IFLA_XDP_SKB_PROG_ID, 3)]).xdp, Some(Xdp { id: 3, driver: false }));
        assert_eq!(with(&[]).xdp, None);
    }

    #[test]
    fn the_loopback_device_has_no_other_end() {
        let all = End::all().unwrap();
        let lo = all.iter().find(|end| end.name == "lo").unwrap();
        assert_eq!(End::of(lo.index).unwrap(), *lo);
        assert!(!lo.veth && lo.other().is_err() && End::of(u32::MAX >> 1).is_err());
    }
}
