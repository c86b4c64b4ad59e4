//! A path with delay, loss and reordering between a lab's client and its nodes: the router sends
//! what arrives from either side through a pair of tun devices, and this process carries packets
//! from one to the other, some later, some not at all.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep_until};

use crate::lab::{Family, Lab};
use crate::netns::Running;
use crate::tun::TunEnd;

/// Impairments of the packets of each direction.
#[derive(Clone, Copy, Debug, Default)]
pub struct Impairment {
    /// The delay of each packet.
    pub delay: Duration,
    /// One packet in this many is lost, at random; 0: none.
    pub lose: u32,
    /// One packet in this many is overtaken by those of the next [`Impairment::late`]; 0: none.
    pub reorder: u32,
    pub late: Duration,
}

/// Numbers of packets that were carried, lost and held back so far, both directions together.
#[derive(Debug, Default)]
pub struct Carried {
    pub packets: AtomicU64,
    pub lost: AtomicU64,
    pub reordered: AtomicU64,
}

/// The impaired path. Dropping it removes its devices; rules and routes to them are removed with
/// the lab.
#[derive(Debug)]
pub struct ImpairedWay {
    carried: Arc<Carried>,
    _carriers: [Running<Result<()>>; 2],
}

/// The router's routing tables, by the side from which a packet arrives.
const FROM_CLIENT: u32 = 771;
const FROM_NODES: u32 = 772;
const PRIORITY: u32 = 500;
/// More bytes than any packet has.
const BUFFER: usize = 65_536 + 64;
/// The most packets in flight; those beyond are lost, as in a router's queue.
const QUEUE: usize = 1 << 17;

impl ImpairedWay {
    /// Impairs all traffic between the client and the nodes.
    pub fn start(lab: &Lab, impairment: Impairment) -> Result<Self> {
        let router = lab.router();
        let end = |name| TunEnd { namespace: router, name, mtu: 1500 };
        let (here, there) = (end("impaired0"), end("impaired1"));
        let files = [here.create()?, there.create()?];
        router.netlink(async |net| {
            for family in Family::BOTH {
                let nodes = lab.node(1).addresses.network().of(family);
                let clients = lab.client().addresses.network().of(family);
                for (from, to, device, table) in
                    [("client", nodes, here.name, FROM_CLIENT), ("br0", clients, there.name, FROM_NODES)]
                {
                    net.route_by_device(table, to, family.prefix(), device).await?;
                    net.rule_arriving(family, from, table, PRIORITY).await?;
                }
            }
            Ok(())
        })?;
        let carried = Arc::new(Carried::default());
        let [a, b] = &files;
        let carrier = |from: &File, to: &File, seed: u64| {
            let (from, to, carried) = (from.try_clone()?, to.try_clone()?, carried.clone());
            Ok::<_, anyhow::Error>(router.start("impaired", async move |mut stop| {
                tokio::select! {
                    () = stop.requested() => Ok(()),
                    ended = carry(from, to, impairment, seed, &carried) => ended,
                }
            }))
        };
        Ok(Self { _carriers: [carrier(a, b, 1)?, carrier(b, a, 2)?], carried })
    }

    pub fn carried(&self) -> &Carried {
        &self.carried
    }
}

/// A packet and the time at which it is to be written. Packets of the same time keep the order in
/// which they arrived.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Held {
    due: Instant,
    number: u64,
    packet: Vec<u8>,
}

/// Carries packets from one device to the other.
async fn carry(from: File, to: File, how: Impairment, seed: u64, carried: &Carried) -> Result<()> {
    let mut random = fastrand::Rng::with_seed(seed);
    // SAFETY: the file keeps its descriptor until it is dropped, together with the registration.
    let from = unsafe { AsyncFd::register(from) }
        .map_err(|error| anyhow::anyhow!("watching a tun device: {error}"))?;
    let mut held = BinaryHeap::<Reverse<Held>>::new();
    let mut buffer = vec![0; BUFFER];
    for number in 0.. {
        let due = held.peek().map(|first| first.0.due);
        let next = async {
            match due {
                Some(due) => sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            ready = from.readable() => {
                let Ok(read) = ready?.try_io(|file| file.get_ref().read(&mut buffer)) else { continue };
                let length = read.context("reading from a tun device")?;
                carried.packets.fetch_add(1, Ordering::Relaxed);
                if how.lose != 0 && random.u32(0..how.lose) == 0 || held.len() >= QUEUE {
                    carried.lost.fetch_add(1, Ordering::Relaxed);
                    continue;
                }
                let mut due = Instant::now() + how.delay;
                if how.reorder != 0 && random.u32(0..how.reorder) == 0 {
                    carried.reordered.fetch_add(1, Ordering::Relaxed);
                    due += how.late;
                }
                held.push(Reverse(Held { due, number, packet: buffer[..length].to_vec() }));
            }
            () = next => {}
        }
        let now = Instant::now();
        while held.peek().is_some_and(|first| first.0.due <= now) {
            let Some(Reverse(first)) = held.pop() else { break };
            write(&to, &first.packet)?;
        }
    }
    Ok(())
}

/// Writes a packet to a tun device. If the device has no room or is down, the packet is lost, as on
/// any wire.
fn write(mut to: &File, packet: &[u8]) -> Result<()> {
    match to.write(packet) {
        Err(error) if error.kind() != ErrorKind::WouldBlock && error.raw_os_error() != Some(libc::EIO) => {
            Err(error).context("writing to a tun device")
        }
        _ => Ok(()),
    }
}
