//! Nodes as the packet path knows them: their names, and which of them are dead.

use std::{collections::BTreeMap, time::Duration};

use anyhow::Result;
use traffic_policy_ebpf::abi::{HOP_PLACES, HopKey, MAC_TAKES, NODE_NAME_LENGTH, NodeSilence};

use super::{
    heartbeat::{Clock, Heartbeat},
    pinned::Pinned,
};
use crate::dataplane::hop_address;

/// Returns the MAC addresses of the other nodes' devices, as far as they have told them, and
/// whether a node takes packets for its endpoints there as they are.
///
/// # Errors
/// The map cannot be read.
pub fn node_macs(pinned: &Pinned) -> Result<BTreeMap<[u8; 6], bool>> {
    let entries = pinned.map("tp_direct_macs")?.entries::<u64, u32>()?;
    let named = entries.into_iter().map(|(key, flags)| {
        let [a, b, c, d, e, f, ..] = key.to_ne_bytes();
        ([a, b, c, d, e, f], flags & MAC_TAKES != 0)
    });
    Ok(named.collect())
}

/// The nodes that endpoints are on, by the numbers that flows and slots have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nodes {
    names: BTreeMap<u16, String>,
    dead: Vec<DeadNode>,
}

/// A node that the agent has found dead, or a next hop that stands for one: its endpoints are left
/// out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadNode {
    /// The node's number, or the place of the next hop.
    pub number: u16,
    pub name: String,
    /// The time since the first SYN to its endpoints that has remained unanswered; `None` if none
    /// has, because the node was found dead in another way.
    pub silent: Option<Duration>,
}

impl DeadNode {
    /// Whether it is a next hop, whose endpoints name no node.
    #[must_use]
    pub fn is_hop(&self) -> bool {
        u32::from(self.number) >= HOP_PLACES
    }
}

impl Nodes {
    /// Reads the nodes of a packet path.
    pub fn read(pinned: &Pinned) -> Result<Self> {
        let entries = pinned.map("tp_node_names")?.entries::<u32, [u8; NODE_NAME_LENGTH]>()?;
        // Without an agent that has told the time, nobody knows for how long.
        let clock = Heartbeat::read(pinned)?.clock().ok();
        let signs = pinned.map("tp_node_silence")?;
        let mut nodes = Self::default();
        for (number, name) in entries {
            let Ok(place) = u16::try_from(number) else { continue };
            nodes.add(place, &name, &signs.value(number)?, clock.as_ref());
        }
        for (key, index) in pinned.map("tp_nexthop_ids")?.entries::<HopKey, u32>()? {
            let place = HOP_PLACES + index;
            if let (Some(hop), Ok(number)) = (hop_address(&key), u16::try_from(place)) {
                nodes.mark(number, hop.to_string(), &signs.value(place)?, clock.as_ref());
            }
        }
        nodes.dead.sort_by(|a, b| a.name.cmp(&b.name));
        // A hop has several places if packets of several sizes leave by it.
        nodes.dead.dedup_by(|a, b| a.name == b.name && a.is_hop());
        Ok(nodes)
    }

    fn add(&mut self, number: u16, name: &[u8], signs: &NodeSilence, clock: Option<&Clock>) {
        let length = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        let name = String::from_utf8_lossy(&name[..length]).into_owned();
        self.mark(number, name.clone(), signs, clock);
        self.names.insert(number, name);
    }

    fn mark(&mut self, number: u16, name: String, signs: &NodeSilence, clock: Option<&Clock>) {
        if signs.dead != 0 {
            let silent = clock.filter(|_| signs.syns != 0).map(|clock| clock.idle(signs.asked));
            self.dead.push(DeadNode { number, name, silent });
        }
    }

    /// Returns the name of a node; `None` for the place of a next hop, and for 0.
    #[must_use]
    pub fn name(&self, number: u16) -> Option<&str> {
        self.names.get(&number).map(String::as_str)
    }

    #[must_use]
    pub fn is_dead(&self, number: u16) -> bool {
        self.dead.iter().any(|node| node.number == number)
    }

    /// Returns the dead nodes, by name.
    #[must_use]
    pub fn dead(&self) -> &[DeadNode] {
        &self.dead
    }

    /// Creates nodes of these numbers and names; the last says whether a node is dead.
    #[must_use]
    pub fn of(nodes: &[(u16, &str, bool)]) -> Self {
        let mut all = Self::default();
        for (number, name, dead) in nodes {
            let signs = NodeSilence { dead: u16::from(*dead), ..NodeSilence::default() };
            all.add(*number, name.as_bytes(), &signs, None);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dead_and_since_when() {
        let clock = Clock { jiffies: 1_000, hz: 250 };
        let mut nodes = Nodes::default();
        let signs = |dead, syns| NodeSilence { asked: 500, dead, syns, ..NodeSilence::default() };
        nodes.add(1, b"near\0\0", &signs(0, 3), Some(&clock));
        nodes.add(2, b"far\0\0", &signs(1, 3), Some(&clock));
        nodes.add(3, b"other\0", &signs(1, 0), Some(&clock));
        assert_eq!((nodes.name(1), nodes.name(2), nodes.name(16_384)), (Some("near"), Some("far"), None));
        assert_eq!([1, 2, 3, 0].map(|number| nodes.is_dead(number)), [false, true, true, false]);
        let dead: Vec<_> = nodes.dead().iter().map(|node| (node.name.as_str(), node.silent)).collect();
        assert_eq!(dead, [("far", Some(Duration::from_secs(2))), ("other", None)], "no SYN was unanswered");
    }
}
