//! Listens to the packet path: refusals and new flows as they happen.

use std::{
    fs::File,
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use aya::maps::{Map, MapData, PerCpuArray, PerCpuValues, RingBuf};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};
use traffic_policy_ebpf::{
    abi::{self, EventBucket, NO_SERVICE, PROTOCOL_UDP, State, destination_port, hook, source_port},
    outcome::Outcome,
};

use super::Pinned;
use crate::{
    dataplane::{
        kernel, pins,
        tables::from_wide,
        words::{Words, state},
    },
    model::Protocol,
};

/// For how long the packet path goes on telling after the last renewal: then a killed listener costs nothing.
const LASTS: Duration = Duration::from_secs(2);

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// CLOCK_MONOTONIC nanoseconds.
    pub time: u64,
    pub outcome: Outcome,
    /// `xdp`, `ingress`, `egress` or `socket`.
    pub hook: &'static str,
    /// Index of the Service port.
    pub service: Option<u32>,
    pub protocol: Protocol,
    /// The unspecified address where a socket has none yet.
    pub client: SocketAddr,
    pub frontend: SocketAddr,
    /// Of a new flow.
    pub endpoint: Option<SocketAddr>,
    /// By which a packet came; 0 for a socket.
    pub ifindex: u32,
    /// Cookie of a socket's network namespace.
    pub netns: u64,
    /// Events of the same CPU that were left out before this one.
    pub left_out: u32,
}

/// The one that listens.
pub struct Listener {
    ring: RingBuf<MapData>,
    state: Words<State>,
    buckets: PerCpuArray<MapData, EventBucket>,
    _lock: Flock<File>,
}

impl Pinned {
    /// Begins to listen. Renewed by [`Listener::renew`], it goes on until the listener is dropped.
    ///
    /// # Errors
    /// Another listens, or the maps cannot be opened for writing.
    pub fn listen(&self) -> Result<Listener> {
        let folder = pins::maps_below(&self.root);
        let lock =
            Flock::lock(File::open(&folder)?, FlockArg::LockExclusiveNonblock).map_err(|(_, error)| {
                match error {
                    Errno::EWOULDBLOCK => {
                        anyhow::anyhow!("another `monitor` is running on this node: one can listen at a time")
                    }
                    error => anyhow::anyhow!("{} cannot be locked: {error}", folder.display()),
                }
            })?;
        let open = |name: &str| -> Result<Map> {
            let data =
                MapData::from_pin(folder.join(name)).with_context(|| format!("{name} cannot be opened"))?;
            Ok(Map::from_map_data(data)?)
        };
        let mut listener = Listener {
            ring: RingBuf::try_from(open("EVENTS")?)?,
            state: Words::new(open("STATE")?)?,
            buckets: PerCpuArray::try_from(open("EVENT_BUCKETS")?)?,
            _lock: lock,
        };
        // What an earlier one did not read.
        while listener.ring.next().is_some() {}
        let none = vec![EventBucket::default(); aya::util::nr_cpus().map_err(|(_, error)| error)?];
        listener.buckets.set(0, PerCpuValues::try_from(none)?, 0)?;
        listener.renew()?;
        Ok(listener)
    }
}

impl Listener {
    /// Says that somebody still listens; to be called each second.
    ///
    /// # Errors
    /// None on Linux.
    pub fn renew(&mut self) -> Result<()> {
        let until = kernel::monotonic()? + LASTS.as_nanos() as u64;
        self.state.store(state::monitor_until, until);
        Ok(())
    }

    /// Waits for an event, at most for `limit`.
    ///
    /// # Errors
    /// The kernel refuses, or wrote what this version does not understand.
    pub fn next(&mut self, limit: Duration) -> Result<Option<Event>> {
        if let Some(event) = self.take()? {
            return Ok(Some(event));
        }
        let mut poll = libc::pollfd { fd: self.ring.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let limit = libc::c_int::try_from(limit.as_millis()).unwrap_or(libc::c_int::MAX);
        // SAFETY: one descriptor, which lives as long as the ring.
        let polled = unsafe { libc::poll(&raw mut poll, 1, limit) };
        if polled < 0 && Errno::last() != Errno::EINTR {
            bail!("waiting for events failed: {}", Errno::last());
        }
        self.take()
    }

    fn take(&mut self) -> Result<Option<Event>> {
        let Some(item) = self.ring.next() else { return Ok(None) };
        if item.len() < size_of::<abi::Event>() {
            bail!("an event has {} bytes, this version expects {}", item.len(), size_of::<abi::Event>());
        }
        // SAFETY: as many bytes as an event has, and any bytes make one.
        let event = unsafe { item.as_ptr().cast::<abi::Event>().read_unaligned() };
        decode(&event).map(Some)
    }

    /// Events left out that no event has told of yet.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn left_out(&self) -> Result<u64> {
        Ok(self.buckets.get(&0, 0)?.iter().map(|bucket| bucket.left_out).sum())
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.state.store(state::monitor_until, 0);
    }
}

fn decode(event: &abi::Event) -> Result<Event> {
    let outcome = Outcome::numbered(event.outcome).with_context(|| {
        format!("an event has outcome {}, which this version does not know", event.outcome)
    })?;
    let address = |wide, port| SocketAddr::new(from_wide(wide, event.ipv6 != 0), u16::from_be(port));
    Ok(Event {
        time: event.time,
        outcome,
        hook: match event.hook {
            hook::XDP => "xdp",
            hook::INGRESS => "tc-ingress",
            hook::EGRESS => "tc-egress",
            _ => "socket",
        },
        service: (event.service != NO_SERVICE).then_some(event.service),
        protocol: if u32::from(event.protocol) == PROTOCOL_UDP { Protocol::Udp } else { Protocol::Tcp },
        client: address(event.source, source_port(event.ports)),
        frontend: address(event.destination, destination_port(event.ports)),
        endpoint: (event.endpoint_port != 0).then(|| address(event.endpoint, event.endpoint_port)),
        ifindex: event.ifindex,
        netns: event.netns,
        left_out: event.left_out,
    })
}
