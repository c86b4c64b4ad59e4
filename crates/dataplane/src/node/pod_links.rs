//! The devices of this node's pods: ends of veth or netkit pairs whose other end is in another
//! network namespace, with what matters to a program there; and devices of other kinds in this
//! namespace that a pod may be behind, with the reason why no program can serve it there. Those
//! that are in a pod's own namespace (macvlan, ipvlan, SR-IOV) cannot be seen from here.

use std::io;

use netlink_sys::protocols::NETLINK_ROUTE;

use super::netlink::{Connection, Message, find, text};

/// The host side of a pod's device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodLink {
    pub index: u32,
    pub name: String,
    pub mtu: u32,
    /// Whether it is a netkit device, which can have programs of a kind of its own.
    pub netkit: bool,
    /// The bridge that it is a port of, and that bridge's MAC address.
    pub bridge: Option<(u32, [u8; 6])>,
    /// A master that is no bridge of the kernel: its name.
    pub other_master: Option<String>,
    /// The queueing discipline for what is sent to the pod.
    pub qdisc: String,
    /// The reason for which no program can serve a pod there, if that is the device's kind.
    pub unsuited: Option<&'static str>,
}

/// Devices without another end, by their kinds, and why no program can serve a pod there.
const UNSUITED: [(&[&str], &str); 2] = [
    (&["tun"], "it is a tap device of this network namespace, and whatever opened it may be behind it"),
    (
        &["macvlan", "macvtap", "ipvlan", "ipvtap"],
        "its packets leave by the device that it shares, without a host side of their own",
    ),
];

/// Returns why no program can serve a pod at a device of this kind.
fn unsuited(kind: &str) -> Option<&'static str> {
    UNSUITED.into_iter().find(|(kinds, _)| kinds.contains(&kind)).map(|(_, reason)| reason)
}

// linux/rtnetlink.h, linux/if_link.h, linux/if_arp.h, linux/pkt_sched.h
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_NEWTFILTER: u16 = 44;
const RTM_GETTFILTER: u16 = 46;
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_QDISC: u16 = 6;
const IFLA_MASTER: u16 = 10;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_LINK_NETNSID: u16 = 37;
const ARPHRD_ETHER: u16 = 1;
/// `struct ifinfomsg`, `struct tcmsg`.
const LINK_HEADER: usize = 16;
const FILTER_HEADER: usize = 20;
/// TC_H_CLSACT with TC_H_MIN_INGRESS and TC_H_MIN_EGRESS.
const CLSACT: [u32; 2] = [0xffff_fff2, 0xffff_fff3];

/// Returns the devices of this network namespace that pods may be behind, in the order of their
/// indices.
pub fn all() -> io::Result<Vec<PodLink>> {
    let messages = Connection::open(NETLINK_ROUTE)?.dump(RTM_GETLINK, &[0; LINK_HEADER])?;
    Ok(of(&messages))
}

/// Returns priority (`tcm_info`) and handle of the TC filters of a device, at ingress and egress.
pub fn filters(index: u32) -> io::Result<Vec<(u32, u32)>> {
    let mut routes = Connection::open(NETLINK_ROUTE)?;
    let mut filters = Vec::new();
    for parent in CLSACT {
        let mut request = vec![0; FILTER_HEADER];
        request[4..8].copy_from_slice(&index.to_ne_bytes());
        request[12..16].copy_from_slice(&parent.to_ne_bytes());
        let messages = routes.dump(RTM_GETTFILTER, &request)?;
        let found = messages.iter().filter(|message| message.kind == RTM_NEWTFILTER);
        let found = found.filter_map(|message| Some((word(message, 16)?, word(message, 8)?)));
        // The kernel also lists each priority on its own, without a filter.
        filters.extend(found.filter(|(_, handle)| *handle != 0));
    }
    Ok(filters)
}

fn of(messages: &[Message]) -> Vec<PodLink> {
    let facts: Vec<_> = messages.iter().filter_map(Facts::of).collect();
    let master = |index: u32| facts.iter().find(|facts| facts.index == index);
    let pods = facts.iter().filter(|facts| {
        let pair = matches!(facts.kind.as_str(), "veth" | "netkit") && facts.elsewhere;
        facts.ethernet && (pair || unsuited(&facts.kind).is_some())
    });
    let pods = pods.map(|facts| {
        let master = facts.master.map(|index| (index, master(index)));
        let is_bridge = master.is_some_and(|(_, facts)| facts.is_some_and(|facts| facts.kind == "bridge"));
        let other = master.filter(|_| !is_bridge);
        PodLink {
            index: facts.index,
            name: facts.name.clone(),
            mtu: facts.mtu,
            netkit: facts.kind == "netkit",
            bridge: master.filter(|_| is_bridge).and_then(|(index, facts)| Some((index, facts?.address))),
            other_master: other.map(|(index, facts)| facts.map_or(index.to_string(), |of| of.name.clone())),
            qdisc: facts.qdisc.clone(),
            unsuited: unsuited(&facts.kind),
        }
    });
    let mut pods: Vec<PodLink> = pods.collect();
    pods.sort_unstable_by_key(|pod| pod.index);
    pods
}

struct Facts {
    index: u32,
    name: String,
    kind: String,
    address: [u8; 6],
    mtu: u32,
    qdisc: String,
    master: Option<u32>,
    elsewhere: bool,
    ethernet: bool,
}

impl Facts {
    fn of(message: &Message) -> Option<Self> {
        if message.kind != RTM_NEWLINK {
            return None;
        }
        let (header, attributes) = message.payload.split_at_checked(LINK_HEADER)?;
        let number =
            |kind| Some(u32::from_ne_bytes(*find(attributes, kind)?.first_chunk()?)).filter(|it| *it != 0);
        let kind = find(attributes, IFLA_LINKINFO).and_then(|info| find(info, IFLA_INFO_KIND)).map(text);
        Some(Self {
            index: word(message, 4)?,
            name: find(attributes, IFLA_IFNAME).map(text)?,
            kind: kind.unwrap_or_default(),
            address: find(attributes, IFLA_ADDRESS).and_then(|it| it.try_into().ok()).unwrap_or_default(),
            mtu: number(IFLA_MTU)?,
            qdisc: find(attributes, IFLA_QDISC).map(text).unwrap_or_default(),
            master: number(IFLA_MASTER),
            // The id 0 of a namespace is valid.
            elsewhere: find(attributes, IFLA_LINK_NETNSID).is_some(),
            ethernet: header.get(2..4) == Some(&ARPHRD_ETHER.to_ne_bytes()),
        })
    }
}

/// Returns the word at `offset` of a message's header.
fn word(message: &Message, offset: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*message.payload.get(offset..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::{super::netlink::attribute, *};

    fn link(index: u32, kind: &str, others: &[Vec<u8>]) -> Message {
        let mut header = vec![0; LINK_HEADER];
        header[2..4].copy_from_slice(&ARPHRD_ETHER.to_ne_bytes());
        header[4..8].copy_from_slice(&index.to_ne_bytes());
        let kind = attribute(IFLA_LINKINFO, &attribute(IFLA_INFO_KIND, format!("{kind}\0").as_bytes()));
        let common = [
            header,
            attribute(IFLA_IFNAME, format!("dev{index}\0").as_bytes()),
            attribute(IFLA_MTU, &1450u32.to_ne_bytes()),
            attribute(IFLA_QDISC, b"noqueue\0"),
            attribute(IFLA_ADDRESS, &[2, 0, 0, 0, 0, index as u8]),
            kind,
        ];
        Message { kind: RTM_NEWLINK, payload: [common.concat(), others.concat()].concat() }
    }

    /// A device whose packets begin with the IP header.
    fn without_ethernet(mut link: Message) -> Message {
        link.payload[2..4].copy_from_slice(&0xfffe_u16.to_ne_bytes());
        link
    }

    #[test]
    fn ends_of_pairs_whose_other_end_is_elsewhere() {
        let elsewhere = || attribute(IFLA_LINK_NETNSID, &0u32.to_ne_bytes());
        let below = |master: u32| attribute(IFLA_MASTER, &master.to_ne_bytes());
        let messages = [
            link(9, "netkit", &[elsewhere()]),
            link(2, "bridge", &[]),
            link(3, "openvswitch", &[]),
            link(4, "veth", &[elsewhere()]),
            link(5, "veth", &[elsewhere(), below(2)]),
            link(6, "veth", &[elsewhere(), below(3)]),
            link(7, "veth", &[]),
            link(8, "ipvlan", &[elsewhere()]),
            link(10, "tun", &[below(2)]),
            without_ethernet(link(11, "tun", &[])),
            link(12, "macvtap", &[]),
            link(13, "vxlan", &[elsewhere()]),
        ];
        let pod = |index, netkit, bridge: Option<u8>, other: Option<&str>| PodLink {
            index,
            name: format!("dev{index}"),
            mtu: 1450,
            netkit,
            bridge: bridge.map(|index| (index.into(), [2, 0, 0, 0, 0, index])),
            other_master: other.map(str::to_owned),
            qdisc: "noqueue".into(),
            unsuited: None,
        };
        let [tap, shared] = UNSUITED.map(|(_, reason)| Some(reason));
        let expected = [
            pod(4, false, None, None),
            pod(5, false, Some(2), None),
            pod(6, false, None, Some("dev3")),
            PodLink { unsuited: shared, ..pod(8, false, None, None) },
            pod(9, true, None, None),
            PodLink { unsuited: tap, ..pod(10, false, Some(2), None) },
            PodLink { unsuited: shared, ..pod(12, false, None, None) },
        ];
        assert_eq!(of(&messages), expected);
    }
}
