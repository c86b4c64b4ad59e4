//! Events of the packet path as they happen: drops, rejections and new flows.

use std::{fs::File, net::SocketAddr, time::Duration};

use anyhow::{Context, Result};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};
use traffic_policy_cluster::model::Protocol;
use traffic_policy_ebpf::{
    abi::{self, NO_SERVICE, Port, hook},
    outcome::Outcome,
};

use super::pinned::Pinned;
use crate::dataplane::{
    bpf::pins,
    clock,
    maps::{
        events::Events,
        keys::{self, from_wide},
    },
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
    /// Events of the same CPU that were suppressed before this one.
    pub suppressed: u32,
}

/// The one that listens.
pub struct Listener {
    events: Events,
    _lock: Flock<File>,
}

impl Listener {
    /// Begins to listen. Renewed by [`Self::renew`], it goes on until the listener is dropped.
    ///
    /// # Errors
    /// Another listens, or the maps cannot be opened for writing.
    pub fn start(pinned: &Pinned) -> Result<Self> {
        let folder = pins::maps_below(pinned.root());
        let lock =
            Flock::lock(File::open(&folder)?, FlockArg::LockExclusiveNonblock).map_err(|(_, error)| {
                match error {
                    Errno::EWOULDBLOCK => {
                        anyhow::anyhow!("another `monitor` is running on this node: one can listen at a time")
                    }
                    error => anyhow::anyhow!("{} cannot be locked: {error}", folder.display()),
                }
            })?;
        let mut listener = Self { events: Events::open(&folder)?, _lock: lock };
        listener.renew()?;
        Ok(listener)
    }

    /// Renews the subscription to events; to be called each second.
    ///
    /// # Errors
    /// None on Linux.
    pub fn renew(&mut self) -> Result<()> {
        let until = clock::monotonic()? + LASTS.as_nanos() as u64;
        self.events.listen_until(until);
        Ok(())
    }

    /// Waits for an event, at most for `limit`. An event about a protocol that this version does not know is passed over,
    /// and ends the wait.
    ///
    /// # Errors
    /// The kernel refuses, or wrote what this version does not understand.
    pub fn next(&mut self, limit: Duration) -> Result<Option<Event>> {
        Ok(self.events.next(limit)?.as_ref().map(decode).transpose()?.flatten())
    }

    /// Events suppressed that no event has told of yet.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn suppressed(&self) -> Result<u64> {
        self.events.suppressed()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.events.listen_until(0);
    }
}

fn decode(event: &abi::MonitorEvent) -> Result<Option<Event>> {
    let Some(protocol) = keys::protocol(event.protocol.into()) else { return Ok(None) };
    let outcome = Outcome::numbered(event.outcome).with_context(|| {
        format!("an event has outcome {}, which this version does not know", event.outcome)
    })?;
    let address = |wide, port: Port| SocketAddr::new(from_wide(wide, event.ipv6 != 0), port.to_host());
    Ok(Some(Event {
        time: event.time,
        outcome,
        hook: match event.hook {
            hook::XDP => "xdp",
            hook::INGRESS => "tc-ingress",
            hook::EGRESS => "tc-egress",
            _ => "socket",
        },
        service: (event.service != NO_SERVICE).then_some(event.service),
        protocol,
        client: address(event.source, event.ports.source()),
        frontend: address(event.destination, event.ports.destination()),
        endpoint: (event.endpoint_port != Port::NONE).then(|| address(event.endpoint, event.endpoint_port)),
        ifindex: event.ifindex,
        netns: event.netns,
        suppressed: event.suppressed,
    }))
}
