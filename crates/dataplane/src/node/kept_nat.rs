//! NAT of connections that began under an earlier proxy, kept alive after its rules are removed.
//!
//! An established connection is translated by its entry in conntrack, not by a rule. However, the
//! kernel registers conntrack and NAT in a network namespace only while some rule uses them: when
//! the last one is deleted, entries stay and translate nothing. Our own table therefore has one
//! chain of type nat, which keeps NAT registered, with one rule that reads conntrack's state
//! without a verdict, which keeps conntrack registered.
//! <https://github.com/torvalds/linux/blob/v6.12/net/netfilter/nf_conntrack_proto.c>
//! (`nf_ct_netns_put`)

use std::io;

use netlink_sys::protocols::NETLINK_NETFILTER;

use super::netlink::{Connection, attribute};

/// The nftables table, of family inet.
pub const TABLE: &str = "traffic-policy";
const CHAIN: &str = "keep-nat";

// linux/netfilter.h, linux/netfilter/nfnetlink.h, linux/netfilter/nf_tables.h
const INET: u8 = 1;
const NFTABLES: u16 = 10;
const NEWTABLE: u16 = NFTABLES << 8;
const GETTABLE: u16 = NFTABLES << 8 | 1;
const DELTABLE: u16 = NFTABLES << 8 | 2;
const NEWCHAIN: u16 = NFTABLES << 8 | 3;
const NEWRULE: u16 = NFTABLES << 8 | 6;
const NLM_F_CREATE: u16 = 0x400;
const NLM_F_APPEND: u16 = 0x800;
const NESTED: u16 = 0x8000;
const REGISTER: u32 = 1;
const NF_INET_PRE_ROUTING: u32 = 0;
/// NF_IP_PRI_NAT_DST
const PRIORITY: i32 = -100;
const NFT_CT_STATE: u32 = 0;
const NFT_CMP_NEQ: u32 = 1;
/// NF_CT_STATE_INVALID_BIT
const INVALID: u32 = 1;

/// Whether NAT is kept.
///
/// # Errors
/// The kernel refuses. A kernel without nf_tables has no table, which is not an error.
pub fn is_there() -> io::Result<bool> {
    let mut netfilter = match Connection::open(NETLINK_NETFILTER) {
        Err(error) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => return Ok(false),
        opened => opened?,
    };
    match netfilter.request(GETTABLE, 0, &payload(&[text(1, TABLE)])) {
        Ok(_) => Ok(true),
        Err(error)
            if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINVAL | libc::EOPNOTSUPP)) =>
        {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Keeps NAT from now on, unless it is kept already.
///
/// # Errors
/// The kernel has no nf_tables, or CAP_NET_ADMIN is missing.
pub fn keep() -> io::Result<()> {
    if is_there()? {
        return Ok(());
    }
    let hook = [number(1, NF_INET_PRE_ROUTING), attribute(2, &PRIORITY.to_be_bytes())].concat();
    let chain = [text(1, TABLE), text(3, CHAIN), attribute(4 | NESTED, &hook), text(7, "nat")];
    let rule = [text(1, TABLE), text(2, CHAIN), attribute(4 | NESTED, &reads_state())];
    Connection::open(NETLINK_NETFILTER)?.transaction(
        NFTABLES,
        &[
            (NEWTABLE, NLM_F_CREATE, payload(&[text(1, TABLE)])),
            (NEWCHAIN, NLM_F_CREATE, payload(&chain)),
            (NEWRULE, NLM_F_CREATE | NLM_F_APPEND, payload(&rule)),
        ],
    )
}

/// Stops keeping NAT; returns whether it was kept.
pub fn release() -> io::Result<bool> {
    if !is_there()? {
        return Ok(false);
    }
    Connection::open(NETLINK_NETFILTER)?
        .transaction(NFTABLES, &[(DELTABLE, 0, payload(&[text(1, TABLE)]))])
        .map(|()| true)
}

/// Returns the expressions of `ct state invalid`, without a verdict.
fn reads_state() -> Vec<u8> {
    let data = |value: u32| attribute(1, &value.to_ne_bytes());
    [
        expression("ct", &[number(1, REGISTER), number(2, NFT_CT_STATE)]),
        expression(
            "bitwise",
            &[
                number(1, REGISTER),
                number(2, REGISTER),
                number(3, 4),
                attribute(4 | NESTED, &data(INVALID)),
                attribute(5 | NESTED, &data(0)),
            ],
        ),
        expression("cmp", &[number(1, REGISTER), number(2, NFT_CMP_NEQ), attribute(3 | NESTED, &data(0))]),
    ]
    .concat()
}

/// Returns an element of a list of expressions.
fn expression(name: &str, attributes: &[Vec<u8>]) -> Vec<u8> {
    attribute(1 | NESTED, &[text(1, name), attribute(2 | NESTED, &attributes.concat())].concat())
}

fn payload(attributes: &[Vec<u8>]) -> Vec<u8> {
    [vec![INET, 0, 0, 0], attributes.concat()].concat()
}

fn text(kind: u16, text: &str) -> Vec<u8> {
    attribute(kind, &[text.as_bytes(), &[0]].concat())
}

fn number(kind: u16, value: u32) -> Vec<u8> {
    attribute(kind, &value.to_be_bytes())
}
