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

/// The time for which the packet path continues to write events after the last renewal: a killed
/// listener then costs nothing.
const LASTS: Duration = Duration::from_secs(2);

/// An event of the packet path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The time of CLOCK_MONOTONIC, in nanoseconds.
    pub time: u64,
    pub outcome: Outcome,
    /// The hook: `xdp`, `ingress`, `egress` or `socket`.
    pub hook: &'static str,
    /// The index of the Service port.
    pub service: Option<u32>,
    pub protocol: Protocol,
    /// The client's address; unspecified if a socket has none yet.
    pub client: SocketAddr,
    pub frontend: SocketAddr,
    /// The endpoint of a new flow.
    pub endpoint: Option<SocketAddr>,
    /// The number of the device on which the packet arrived; 0 for a socket.
    pub ifindex: u32,
    /// The cookie of a socket's network namespace.
    pub netns: u64,
    /// The number of events of the same CPU that were suppressed before this one.
    pub suppressed: u32,
}

/// The single listener to events.
pub struct Listener {
    events: Events,
    _lock: Flock<File>,
}

impl Listener {
    /// Starts to listen. If it is renewed by [`Self::renew`], it continues until the listener is
    /// dropped.
    ///
    /// # Errors
    /// Another listener is active, or the maps cannot be opened for writing.
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

    /// Renews the subscription to events; to be called every second.
    pub fn renew(&mut self) -> Result<()> {
        let until = clock::monotonic()? + LASTS.as_nanos() as u64;
        self.events.listen_until(until);
        Ok(())
    }

    /// Waits for an event, for at most `limit`. An event about a protocol that this version does
    /// not know is skipped, and ends the wait.
    ///
    /// # Errors
    /// The kernel refuses, or wrote an event that this version does not understand.
    pub fn next(&mut self, limit: Duration) -> Result<Option<Event>> {
        Ok(self.events.next(limit)?.as_ref().map(decode).transpose()?.flatten())
    }

    /// Returns the number of suppressed events that no event has reported yet.
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
