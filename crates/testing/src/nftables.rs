//! Tables and base chains of nftables, made in a namespace without `nft`.

use anyhow::{Context, Result};
use traffic_policy_dataplane::node::netlink::{Connection, attribute, protocols::NETLINK_NETFILTER};

use crate::netns::Namespace;

/// The family of a table, as linux/netfilter.h numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    Inet = 1,
    Ip = 2,
    Ip6 = 10,
}

/// A chain to be made, together with its table.
#[derive(Clone, Copy, Debug)]
pub struct Chain<'a> {
    pub family: Family,
    pub table: &'a str,
    pub name: &'a str,
    /// Whether the chain is hooked into the forward path; if so, whether its policy is DROP.
    pub forward: Option<bool>,
}

// linux/netlink.h, linux/netfilter/nfnetlink.h, linux/netfilter/nf_tables.h
const CREATE: u16 = 0x400;
const NESTED: u16 = 0x8000;
const SUBSYSTEM: u16 = 10;
const NEWTABLE: u16 = SUBSYSTEM << 8;
const DELTABLE: u16 = SUBSYSTEM << 8 | 2;
const NEWCHAIN: u16 = SUBSYSTEM << 8 | 3;

impl Namespace {
    /// Makes a table without chains.
    pub fn nft_table(&self, family: Family, name: &str) -> Result<()> {
        self.transaction(&[request(NEWTABLE, family, &text(1, name))])
            .with_context(|| format!("making the nftables table {name}"))
    }

    pub fn nft_chain(&self, chain: &Chain<'_>) -> Result<()> {
        let mut attributes = [text(1, chain.table), text(3, chain.name)].concat();
        if let Some(drops) = chain.forward {
            // NF_INET_FORWARD, priority 0; NF_DROP is 0, NF_ACCEPT 1.
            let hook = [attribute(1, &2u32.to_be_bytes()), attribute(2, &0u32.to_be_bytes())].concat();
            attributes.extend(attribute(4 | NESTED, &hook));
            attributes.extend(attribute(5, &u32::from(!drops).to_be_bytes()));
            attributes.extend(text(7, "filter"));
        }
        self.transaction(&[
            request(NEWTABLE, chain.family, &text(1, chain.table)),
            request(NEWCHAIN, chain.family, &attributes),
        ])
        .with_context(|| format!("making the nftables chain {}", chain.name))
    }

    /// Makes a table that drops all packets of its family to the namespace's own addresses.
    pub fn nft_drop_input(&self, family: Family, table: &str) -> Result<()> {
        // NF_INET_LOCAL_IN, priority 0; NF_DROP.
        let hook = [attribute(1, &1u32.to_be_bytes()), attribute(2, &0u32.to_be_bytes())].concat();
        let mut attributes = [text(1, table), text(3, "input"), attribute(4 | NESTED, &hook)].concat();
        attributes.extend(attribute(5, &0u32.to_be_bytes()));
        attributes.extend(text(7, "filter"));
        let requests = [request(NEWTABLE, family, &text(1, table)), request(NEWCHAIN, family, &attributes)];
        self.transaction(&requests).with_context(|| format!("making the nftables table {table}"))
    }

    /// Deletes a table with its chains.
    pub fn delete_nft_table(&self, family: Family, name: &str) -> Result<()> {
        self.transaction(&[request(DELTABLE, family, &text(1, name))])
            .with_context(|| format!("deleting the nftables table {name}"))
    }

    fn transaction(&self, requests: &[(u16, u16, Vec<u8>)]) -> Result<()> {
        self.run(|| Ok(Connection::open(NETLINK_NETFILTER)?.transaction(SUBSYSTEM, requests)?))
    }
}

fn text(kind: u16, text: &str) -> Vec<u8> {
    attribute(kind, &[text.as_bytes(), &[0]].concat())
}

fn request(kind: u16, family: Family, attributes: &[u8]) -> (u16, u16, Vec<u8>) {
    (kind, CREATE, [&[family as u8, 0, 0, 0], attributes].concat())
}
