//! Nodes that have stopped answering, as the packet path notices them (`tp_node_silence`,
//! `tp_suspicions`), and their names (`tp_node_names`).

use std::{
    collections::BTreeMap,
    fmt,
    future::{Future, pending},
};

use anyhow::{Context as _, Result};
use aya::{
    Ebpf,
    maps::{HashMap, MapData, RingBuf},
};
use tokio::io::unix::AsyncFd;
use traffic_policy_ebpf::abi::{
    HOP_PLACES, HOPS, HOPS_PER_GENERATION, HopKey, NODE_NAME_LENGTH, NodeSilence as Signs, Suspicion,
};

use super::{
    Dataplane,
    maps::{
        keys::from_wide,
        mmap::{Mapped, config},
        take,
    },
};
use crate::node::HopAddress;

/// One whose endpoints are silent.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Suspect {
    /// A node, by the name that its endpoints give.
    Node(String),
    /// The next hop of endpoints that name no node.
    Hop(HopAddress),
}

/// The name of a node as it is; that of a hop is none that a node can have.
impl fmt::Display for Suspect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(name) => f.write_str(name),
            Self::Hop(hop) => hop.fmt(f),
        }
    }
}

/// The suspicion that a node is dead: SYNs to its endpoints are not answered, none of them.
pub trait NodeSilence {
    /// Sets when a node is suspected: after this many SYNs, unanswered for 200 ms. 0: never.
    fn suspect_after(&mut self, syns: u32);

    /// Waits for the next suspicion. Cancel-safe. It never returns if nothing is suspected.
    fn suspected(&mut self) -> impl Future<Output = Suspect> + Send;

    /// Lets one that was found alive be suspected again.
    fn suspect_again(&mut self, suspect: &Suspect);

    /// Sets whether one is dead: SYNs that are retransmitted to its endpoints go to others.
    fn set_dead(&mut self, suspect: &Suspect, dead: bool);

    /// Returns the numbers by which the maps know nodes, with the names.
    fn node_numbers(&self) -> Vec<(u16, String)>;

    /// Writes numbers of nodes, before any endpoint has them.
    fn number_nodes(&mut self, nodes: Vec<(u16, String)>) -> Result<()>;
}

/// The time in milliseconds for which SYNs have to remain unanswered. It is longer than the round
/// trip between nodes of one cluster.
const UNANSWERED: u32 = 200;

/// The maps about silent nodes.
pub struct Silence {
    signs: Mapped<Places>,
    names: HashMap<MapData, u32, [u8; NODE_NAME_LENGTH]>,
    /// The ring, until the first call that waits for it.
    ring: Option<RingBuf<MapData>>,
    waiting: Option<AsyncFd<RingBuf<MapData>>>,
    /// The content of `names`.
    numbered: BTreeMap<u16, String>,
}

type Places = [Signs; (HOP_PLACES + HOPS) as usize];

impl Silence {
    /// Takes the maps out of a loaded object.
    ///
    /// # Errors
    /// A map is missing or of another type, or the names cannot be read.
    pub fn open(object: &mut Ebpf) -> Result<Self> {
        let mut signs = Mapped::new(take(object, "tp_node_silence")?)?;
        let names: HashMap<_, _, _> = take(object, "tp_node_names")?;
        let ring = take(object, "tp_suspicions")?;
        let mut numbered = BTreeMap::new();
        for entry in &names {
            let (number, name) = entry.context("the names of nodes cannot be read")?;
            if let (Ok(number), Some(name)) = (u16::try_from(number), text(&name)) {
                numbered.insert(number, name);
            }
        }
        // An earlier agent may have stopped while a node was dead: this one judges for itself.
        let hops = HOP_PLACES as usize..(HOP_PLACES + HOPS) as usize;
        for place in numbered.keys().map(|number| usize::from(*number)).chain(hops) {
            signs.store(word(place, dead_flag), 0);
        }
        Ok(Self { signs, names, ring: Some(ring), waiting: None, numbered })
    }

    /// Returns the places of a suspect: none for a node that endpoints have never named, several
    /// for a hop by which packets of several sizes leave.
    fn places(&self, suspect: &Suspect, hops: &HopIndex) -> Vec<usize> {
        match suspect {
            Suspect::Node(node) => {
                let place = self.numbered.iter().find(|(_, name)| *name == node);
                place.map(|(number, _)| usize::from(*number)).into_iter().collect()
            }
            Suspect::Hop(hop) => {
                let found =
                    hops.iter().filter_map(Result::ok).filter(|(key, _)| hop_address(key) == Some(*hop));
                found.map(|(_, index)| hop_place(index)).collect()
            }
        }
    }

    /// Forgets the signs of a generation of hops, whose numbers are given anew.
    pub fn forget_hops(&mut self, generation: u32) {
        let first = generation * HOPS_PER_GENERATION;
        for index in first..first + HOPS_PER_GENERATION {
            self.signs.store(word(hop_place(index), |signs| signs), Signs::default());
        }
    }
}

type HopIndex = HashMap<MapData, HopKey, u32>;

fn hop_place(index: u32) -> usize {
    (HOP_PLACES + index % HOPS) as usize
}

/// Returns the neighbour that is a hop; `None` for a device without Ethernet, behind which there
/// may be any number of nodes.
pub(crate) fn hop_address(key: &HopKey) -> Option<HopAddress> {
    let address = from_wide(key.gateway, i32::from(key.family) != libc::AF_INET);
    (!address.is_unspecified()).then_some(HopAddress { link: key.ifindex, address })
}

/// Returns the next one of the ring who can be asked.
fn next(ring: &mut RingBuf<MapData>, numbered: &BTreeMap<u16, String>, hops: &HopIndex) -> Option<Suspect> {
    loop {
        let item = ring.next()?;
        if item.len() < size_of::<Suspicion>() {
            continue;
        }
        // SAFETY: the item has as many bytes as a suspicion, and any bytes are a valid one.
        let suspicion = unsafe { item.as_ptr().cast::<Suspicion>().read_unaligned() };
        let suspect = match suspicion.place.checked_sub(HOP_PLACES) {
            Some(index) => {
                let mut of_index = hops.iter().filter_map(Result::ok).filter(|(_, other)| *other == index);
                of_index.find_map(|(key, _)| hop_address(&key)).map(Suspect::Hop)
            }
            None => {
                let number = u16::try_from(suspicion.place).ok();
                number.and_then(|number| numbered.get(&number)).cloned().map(Suspect::Node)
            }
        };
        if suspect.is_some() {
            return suspect;
        }
    }
}

/// Returns a word of the element at a place.
fn word<W>(place: usize, field: impl Fn(*mut Signs) -> *mut W) -> impl Fn(*mut Places) -> *mut W {
    // A place that does not exist has no name.
    let place = place % (HOP_PLACES + HOPS) as usize;
    // SAFETY: an address within the mapped array.
    move |places| field(unsafe { places.cast::<Signs>().add(place) })
}

fn syns(signs: *mut Signs) -> *mut u16 {
    // SAFETY: an address within the element; nothing is read.
    unsafe { &raw mut (*signs).syns }
}

fn dead_flag(signs: *mut Signs) -> *mut u16 {
    // SAFETY: as above.
    unsafe { &raw mut (*signs).dead }
}

fn text(name: &[u8; NODE_NAME_LENGTH]) -> Option<String> {
    let end = name.iter().position(|byte| *byte == 0)?;
    String::from_utf8(name[..end].to_vec()).ok()
}

impl NodeSilence for Dataplane {
    fn suspect_after(&mut self, syns: u32) {
        let hz = self.maps.heartbeat.load(super::maps::mmap::heartbeat::hz);
        self.maps.config.store(config::suspect_after, (UNANSWERED * hz / 1000).max(1));
        self.maps.config.store(config::suspect_syns, syns);
    }

    async fn suspected(&mut self) -> Suspect {
        let silence = &mut self.silence;
        if let Some(ring) = silence.ring.take() {
            // SAFETY: the ring keeps its descriptor, open and the same, as long as it lives.
            match unsafe { AsyncFd::register(ring) } {
                Ok(waiting) => silence.waiting = Some(waiting),
                Err(error) => tracing::warn!("dead nodes are not noticed: tp_suspicions: {error}"),
            }
        }
        let Some(waiting) = &mut silence.waiting else { return pending().await };
        loop {
            if let Some(suspect) = next(waiting.get_mut(), &silence.numbered, &self.maps.hop_index) {
                return suspect;
            }
            match waiting.readable_mut().await {
                Ok(mut guard) => guard.clear_ready(),
                Err(error) => {
                    tracing::warn!("dead nodes are not noticed any more: tp_suspicions: {error}");
                    return pending().await;
                }
            }
        }
    }

    fn suspect_again(&mut self, suspect: &Suspect) {
        for place in self.silence.places(suspect, &self.maps.hop_index) {
            self.silence.signs.store(word(place, syns), 0);
        }
    }

    fn set_dead(&mut self, suspect: &Suspect, dead: bool) {
        for place in self.silence.places(suspect, &self.maps.hop_index) {
            self.silence.signs.store(word(place, dead_flag), u16::from(dead));
        }
        if !dead {
            self.suspect_again(suspect);
        }
    }

    fn node_numbers(&self) -> Vec<(u16, String)> {
        self.silence.numbered.clone().into_iter().collect()
    }

    fn number_nodes(&mut self, nodes: Vec<(u16, String)>) -> Result<()> {
        for (number, name) in nodes {
            let mut bytes = [0; NODE_NAME_LENGTH];
            let length = name.len().min(NODE_NAME_LENGTH - 1);
            bytes[..length].copy_from_slice(&name.as_bytes()[..length]);
            // Signs of the node that had the number before.
            self.silence.signs.store(word(usize::from(number), |signs| signs), Signs::default());
            self.silence
                .names
                .insert(u32::from(number), bytes, 0)
                .with_context(|| format!("the number of node {name} cannot be written to tp_node_names"))?;
            self.silence.numbered.insert(number, name);
        }
        Ok(())
    }
}
