//! The tables and chains of nf_tables in this network namespace, including those of iptables-nft.
//! They are only read.

mod invalid;

use std::{fmt, io};

pub use self::invalid::invalid_drops;
use super::netlink::{Connection, find, protocols::NETLINK_NETFILTER, text};

/// The families whose hooks see IP packets in the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    Inet,
    Ip,
    Ip6,
}

impl Family {
    /// Returns the family of a number NFPROTO_* of linux/netfilter.h.
    const fn from_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Inet),
            2 => Some(Self::Ip),
            10 => Some(Self::Ip6),
            _ => None,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inet => "inet",
            Self::Ip => "ip",
            Self::Ip6 => "ip6",
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    pub family: Family,
    pub name: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    pub table: Table,
    pub name: String,
    /// Whether it is called where packets are forwarded.
    pub forward: bool,
    /// Whether its policy is drop: packets that none of its rules decides are dropped.
    pub drops: bool,
    /// Whether it changes the source of packets that leave.
    pub source_nat: bool,
    /// Whether it has rules, or others lead to it.
    pub in_use: bool,
}

/// Tables and chains of nftables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    pub tables: Vec<Table>,
    pub chains: Vec<Chain>,
}

// linux/netfilter/nfnetlink.h, linux/netfilter/nf_tables.h
const NFTABLES: u16 = 10 << 8;
const GETTABLE: u16 = 1;
const GETCHAIN: u16 = 4;
const TABLE_NAME: u16 = 1;
const CHAIN_TABLE: u16 = 1;
const CHAIN_NAME: u16 = 3;
const CHAIN_HOOK: u16 = 4;
const CHAIN_POLICY: u16 = 5;
const CHAIN_USE: u16 = 6;
const CHAIN_TYPE: u16 = 7;
const HOOK_NUMBER: u16 = 1;
const NF_INET_POST_ROUTING: u32 = 4;
const NF_INET_FORWARD: u32 = 2;
const NF_DROP: u32 = 0;
/// Length of `struct nfgenmsg`.
const HEADER: usize = 4;

impl Rules {
    /// Reads the rules. A kernel without nf_tables has none.
    pub fn read() -> io::Result<Self> {
        let tables = dump(NFTABLES | GETTABLE)?.iter().filter_map(|message| table(message)).collect();
        let chains = dump(NFTABLES | GETCHAIN)?.iter().filter_map(|message| chain(message)).collect();
        Ok(Self { tables, chains })
    }
}

/// Reads all objects of a kind; none from a kernel without nf_tables.
fn dump(kind: u16) -> io::Result<Vec<Vec<u8>>> {
    // Family 0 stands for all of them; the version is 0, and no resource is given.
    dump_of(kind, &[0; HEADER])
}

/// Reads the objects that a request asks for.
fn dump_of(kind: u16, request: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    let mut netfilter = match Connection::open(NETLINK_NETFILTER) {
        Err(error) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => return Ok(Vec::new()),
        opened => opened?,
    };
    match netfilter.dump(kind, request) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => Ok(Vec::new()),
        dumped => Ok(dumped?.into_iter().map(|message| message.payload).collect()),
    }
}

fn table(message: &[u8]) -> Option<Table> {
    let name = text(find(message.get(HEADER..)?, TABLE_NAME)?);
    Some(Table { family: Family::from_number(*message.first()?)?, name })
}

fn chain(message: &[u8]) -> Option<Chain> {
    let attributes = message.get(HEADER..)?;
    let number = |value: &[u8]| value.first_chunk().map(|bytes| u32::from_be_bytes(*bytes));
    let hook = find(attributes, CHAIN_HOOK).and_then(|hook| find(hook, HOOK_NUMBER)).and_then(number);
    let policy = find(attributes, CHAIN_POLICY).and_then(number);
    let table =
        Table { family: Family::from_number(*message.first()?)?, name: text(find(attributes, CHAIN_TABLE)?) };
    Some(Chain {
        table,
        name: text(find(attributes, CHAIN_NAME)?),
        forward: hook == Some(NF_INET_FORWARD),
        drops: policy == Some(NF_DROP),
        source_nat: hook == Some(NF_INET_POST_ROUTING)
            && find(attributes, CHAIN_TYPE).map(text).as_deref() == Some("nat"),
        in_use: find(attributes, CHAIN_USE).and_then(number).is_some_and(|rules| rules > 0),
    })
}
