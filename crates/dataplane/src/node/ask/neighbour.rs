//! Probes of the kernel's neighbour entries for addresses that are on-link.
//!
//! ARP and NDP are left to the kernel: own requests would take a packet socket, and the agent gives
//! up CAP_NET_RAW. An entry that is set to NUD_PROBE is probed in the next jiffy by unicast
//! (`neigh_timer_handler`), and becomes NUD_REACHABLE when it is answered; until then, packets use
//! it as before. <https://github.com/torvalds/linux/blob/v6.1/net/core/neighbour.c#L1049>
//! An address without a valid entry is resolved by multicast. The kernel repeats that after a
//! second, too late for a question: the entry is made to begin anew, and packets that wait for it
//! stay.
//!
//! The kernel ignores the state in an update of a managed entry (`__neigh_update`), which then says
//! NUD_REACHABLE for up to 45 s after the last answer: such an entry is set to NUD_PROBE without
//! NTF_EXT_MANAGED, and is managed again at once.
//! <https://github.com/torvalds/linux/blob/v6.1/net/core/neighbour.c#L1328>

use std::{io, net::IpAddr};

use super::super::{
    netlink::{Connection, Message, attribute, find, protocols},
    way::{HopAddress, parts, way},
};

// linux/rtnetlink.h, linux/neighbour.h
const RTM_NEWNEIGH: u16 = 28;
const RTM_GETNEIGH: u16 = 30;
const NLM_F_REPLACE: u16 = 0x100;
const NLM_F_CREATE: u16 = 0x400;
const NDA_DST: u16 = 1;
const NDA_FLAGS_EXT: u16 = 15;
const NTF_USE: u8 = 1;
const NTF_EXT_MANAGED: u32 = 1;
const NUD_INCOMPLETE: u16 = 0x01;
const NUD_REACHABLE: u16 = 0x02;
const NUD_STALE: u16 = 0x04;
const NUD_DELAY: u16 = 0x08;
const NUD_PROBE: u16 = 0x10;
const NUD_NOARP: u16 = 0x40;
const NUD_PERMANENT: u16 = 0x80;
/// `struct ndmsg`.
const HEADER: usize = 12;

/// A connection to the kernel, and the addresses that are on-link.
#[derive(Debug)]
pub struct Prober {
    kernel: Connection,
    neighbours: Vec<Probed>,
}

#[derive(Debug)]
struct Probed {
    address: IpAddr,
    link: u32,
    /// Whether the entry has been set to a state that only an answer ends as reachable.
    sent: bool,
}

/// A neighbour entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Entry {
    state: u16,
    flags: u8,
    /// NTF_EXT_MANAGED among others: an update that lacks them clears them.
    more: Option<u32>,
}

impl Entry {
    fn unmanaged(self) -> Self {
        Self { more: self.more.map(|more| more & !NTF_EXT_MANAGED), ..self }
    }
}

impl Prober {
    /// Opens a connection, and looks up the routes. `hop`: a neighbour whose device is known.
    pub fn open(addresses: impl Iterator<Item = IpAddr>, hop: Option<HopAddress>) -> io::Result<Self> {
        let mut kernel = Connection::open(protocols::NETLINK_ROUTE)?;
        let hop = hop.map(|hop| Probed { address: hop.address, link: hop.link, sent: false });
        let mut neighbours = Vec::from_iter(hop);
        for address in addresses {
            if neighbours.iter().any(|known| known.address == address) {
                continue;
            }
            if let Some(link) = on_link(&mut kernel, address) {
                neighbours.push(Probed { address, link, sent: false });
            }
        }
        Ok(Self { kernel, neighbours })
    }

    /// Makes the kernel ask for each address, and returns those that it asks for.
    pub fn send(&mut self) -> Vec<(IpAddr, io::Result<()>)> {
        let mut sent = Vec::new();
        for probed in &mut self.neighbours {
            let entry = match entry(&mut self.kernel, probed) {
                Ok(entry) => entry.unwrap_or_default(),
                Err(error) => {
                    sent.push((probed.address, Err(error)));
                    continue;
                }
            };
            // Nobody is asked for these.
            if entry.state & (NUD_NOARP | NUD_PERMANENT) != 0 {
                continue;
            }
            let mut set =
                |flags, entry| self.kernel.request(RTM_NEWNEIGH, flags, &update(probed, entry)).map(drop);
            let result = if entry.state & (NUD_REACHABLE | NUD_STALE | NUD_DELAY | NUD_PROBE) == 0 {
                let begun = match entry.state & NUD_INCOMPLETE {
                    0 => Ok(()),
                    _ => set(NLM_F_REPLACE, Entry { state: 0, ..entry.unmanaged() }),
                };
                let used = Entry { state: 0, flags: entry.flags | NTF_USE, ..entry };
                begun.and(set(NLM_F_CREATE | NLM_F_REPLACE, used))
            } else {
                // An entry that is probed already is probed anew only if it leaves that state.
                let mut to = |state| set(NLM_F_REPLACE, Entry { state, ..entry.unmanaged() });
                let asked = to(NUD_STALE).and_then(|()| to(NUD_PROBE));
                if entry == entry.unmanaged() {
                    asked
                } else {
                    // Whatever became of the probe, the kernel has to go on keeping the entry.
                    let kept = set(NLM_F_REPLACE, Entry { state: NUD_PROBE, ..entry });
                    asked.and(kept)
                }
            };
            probed.sent |= result.is_ok();
            sent.push((probed.address, result));
        }
        sent
    }

    /// Returns an address that was asked for and is reachable.
    pub fn answered(&mut self) -> Option<IpAddr> {
        let Self { kernel, neighbours } = self;
        let mut sent = neighbours.iter().filter(|probed| probed.sent);
        let reachable = sent.find(|probed| {
            entry(kernel, probed).is_ok_and(|entry| entry.is_some_and(|entry| entry.state == NUD_REACHABLE))
        });
        reachable.map(|probed| probed.address)
    }
}

/// Returns the device on which an address is a neighbour, if it is one.
fn on_link(kernel: &mut Connection, address: IpAddr) -> Option<u32> {
    let hop = way(kernel, address).ok()??;
    (hop.address == address).then_some(hop.link)
}

/// Reads an entry; `None` if there is none.
fn entry(kernel: &mut Connection, probed: &Probed) -> io::Result<Option<Entry>> {
    match kernel.request(RTM_GETNEIGH, 0, &message(probed, Entry::default())) {
        Ok(messages) => Ok(messages.iter().find_map(read)),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

fn read(message: &Message) -> Option<Entry> {
    let header = message.payload.get(..HEADER)?;
    let more = find(message.payload.get(HEADER..)?, NDA_FLAGS_EXT).and_then(|bytes| bytes.first_chunk());
    Some(Entry {
        state: u16::from_ne_bytes([header[8], header[9]]),
        flags: header[10],
        more: more.map(|bytes| u32::from_ne_bytes(*bytes)),
    })
}

fn update(probed: &Probed, entry: Entry) -> Vec<u8> {
    let mut bytes = message(probed, entry);
    bytes.extend(entry.more.map(|more| attribute(NDA_FLAGS_EXT, &more.to_ne_bytes())).unwrap_or_default());
    bytes
}

fn message(probed: &Probed, entry: Entry) -> Vec<u8> {
    let (family, _, bytes) = parts(probed.address);
    let mut message = vec![family, 0, 0, 0];
    message.extend(probed.link.to_ne_bytes());
    message.extend(entry.state.to_ne_bytes());
    message.extend([entry.flags, 0]);
    message.extend(attribute(NDA_DST, &bytes));
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise a probe would end the kernel's care for an entry, or a router's place.
    #[test]
    fn an_update_keeps_the_flags_that_it_has_read() {
        let probed = Probed { address: [192, 0, 2, 1].into(), link: 3, sent: false };
        let entry = Entry { state: NUD_STALE, flags: 0x80, more: Some(1) };
        assert_eq!(read(&Message { kind: RTM_NEWNEIGH, payload: update(&probed, entry) }), Some(entry));
        for end in 0..HEADER {
            let payload = update(&probed, entry)[..end].to_vec();
            assert_eq!(read(&Message { kind: RTM_NEWNEIGH, payload }), None);
        }
    }
}
