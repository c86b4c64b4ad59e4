//! The other end of a veth, also where it lies in another network namespace: by the number that this one has for that.

use std::io;

use netlink_sys::protocols::NETLINK_ROUTE;

use super::Finding;
use crate::{
    dataplane::introspect,
    node::netlink::{Connection, Message, attribute, find, text},
};

/// What is known of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OtherEnd {
    name: String,
    pub(super) mtu: u32,
    /// It has an XDP program in the driver.
    pub(super) xdp: bool,
    /// It lies in another network namespace.
    elsewhere: bool,
}

// linux/rtnetlink.h, linux/if_link.h
const RTM_GETLINK: u16 = 18;
const RTM_NEWLINK: u16 = 16;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_LINK: u16 = 5;
const IFLA_LINK_NETNSID: u16 = 37;
const IFLA_XDP: u16 = 43;
const IFLA_TARGET_NETNSID: u16 = 46;
const IFLA_XDP_DRV_PROG_ID: u16 = 5;
/// `struct ifinfomsg`.
const HEADER: usize = 16;

impl OtherEnd {
    /// # Errors
    /// The device is no veth or gone; its other end lies where this process may not look.
    pub(super) fn of(index: u32) -> io::Result<Self> {
        let mut routes = Connection::open(NETLINK_ROUTE)?;
        let near = link(&mut routes, index, None)?;
        let peer = number(&near, IFLA_LINK).filter(|peer| *peer != 0).ok_or_else(unknown)?;
        let namespace = number(&near, IFLA_LINK_NETNSID);
        let far = link(&mut routes, peer, namespace)?;
        let xdp = find(&far, IFLA_XDP).and_then(|xdp| number(xdp, IFLA_XDP_DRV_PROG_ID));
        Ok(Self {
            name: find(&far, IFLA_IFNAME).map(text).ok_or_else(unknown)?,
            mtu: number(&far, IFLA_MTU).ok_or_else(unknown)?,
            xdp: xdp.is_some_and(|program| program != 0),
            elsewhere: namespace.is_some(),
        })
    }

    fn described(&self) -> String {
        if self.elsewhere { format!("{} in another network namespace", self.name) } else { self.name.clone() }
    }
}

fn unknown() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "the kernel does not tell of the other end")
}

/// The attributes of a device, in the namespace with this number.
fn link(routes: &mut Connection, index: u32, namespace: Option<u32>) -> io::Result<Vec<u8>> {
    let mut request = vec![0; HEADER];
    request[4..8].copy_from_slice(&index.to_ne_bytes());
    if let Some(namespace) = namespace {
        request.extend(attribute(IFLA_TARGET_NETNSID, &namespace.to_ne_bytes()));
    }
    let answer = routes.request(RTM_GETLINK, 0, &request)?;
    let attributes = |message: &Message| {
        (message.kind == RTM_NEWLINK).then(|| message.payload.get(HEADER..).map(<[u8]>::to_vec))?
    };
    answer.iter().find_map(attributes).ok_or_else(unknown)
}

fn number(attributes: &[u8], kind: u16) -> Option<u32> {
    find(attributes, kind)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}

/// XDP in the driver of a veth: what it sends back by the veth (XDP_TX) arrives only if the other end has an XDP program,
/// too; GRO there will do for redirects only (`veth_xdp_flush`, `veth_xdp_xmit` in drivers/net/veth.c).
pub(super) fn judge(name: &str, other: Option<&OtherEnd>) -> Option<Finding> {
    let (found, at) = match other {
        Some(other) if other.xdp => return None,
        Some(other) => (
            format!(
                "{name} is a veth, and its other end ({}) has no XDP program: what XDP sends back by {name} is lost there in silence, every packet to an endpoint on another node among it",
                other.described()
            ),
            other.name.clone(),
        ),
        None => (
            format!(
                "{name} is a veth, and whether its other end has an XDP program could not be seen: if it has none, what XDP sends back by {name} is lost there in silence"
            ),
            "<other end>".to_owned(),
        ),
    };
    Some(Finding::warning(
        "other-end",
        found,
        format!(
            "--attach auto or tc; or at the other end any XDP program in the driver that passes all (`ip link set {at} xdpdrv object pass.o section xdp`)"
        ),
    ))
}

/// What `run` says of a device that it attached XDP to in the driver; `None` if it is no veth, or fit.
#[must_use]
pub fn lost_at_other_end(device: &str, index: u32) -> Option<Finding> {
    (introspect::driver(device)? == "veth").then(|| judge(device, OtherEnd::of(index).ok().as_ref()))?
}

#[cfg(test)]
impl OtherEnd {
    pub(super) fn for_tests(xdp: bool, mtu: u32) -> Self {
        Self { name: "veth7".into(), mtu, xdp, elsewhere: true }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_there() {
        assert_eq!(judge("eth0", Some(&OtherEnd::for_tests(true, 1500))), None);
        let finding = judge("eth0", Some(&OtherEnd::for_tests(false, 1500))).unwrap();
        assert!(finding.found.contains("(veth7 in another network namespace) has no XDP program"));
        assert!(finding.found.contains("lost there in silence"));
        assert!(finding.fix.unwrap().contains("ip link set veth7 xdpdrv"));
        let finding = judge("eth0", None).unwrap();
        assert!(finding.found.contains("could not be seen") && finding.fix.is_some());
    }
}
