//! The ring of events, and the word that makes the packet path write to it.

use std::{
    os::fd::{AsFd, AsRawFd},
    path::Path,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use aya::maps::{Map, MapData, PerCpuArray, PerCpuValues, RingBuf};
use nix::errno::Errno;
use traffic_policy_ebpf::abi::{EventBucket, MonitorEvent, RuntimeConfig};

use super::mmap::{Mapped, config};

/// The pinned maps of events.
pub struct Events {
    ring: RingBuf<MapData>,
    config: Mapped<RuntimeConfig>,
    buckets: PerCpuArray<MapData, EventBucket>,
}

impl Events {
    /// Opens the maps pinned in `folder`, and discards events that an earlier listener did not
    /// read.
    pub fn open(folder: &Path) -> Result<Self> {
        let open = |name: &str| -> Result<Map> {
            let data =
                MapData::from_pin(folder.join(name)).with_context(|| format!("{name} cannot be opened"))?;
            Ok(Map::from_map_data(data)?)
        };
        let mut events = Self {
            ring: RingBuf::try_from(open("tp_events")?)?,
            config: Mapped::new(open("tp_config")?)?,
            buckets: PerCpuArray::try_from(open("tp_event_limit")?)?,
        };
        while events.ring.next().is_some() {}
        let none = vec![EventBucket::default(); aya::util::nr_cpus().map_err(|(_, error)| error)?];
        events.buckets.set(0, PerCpuValues::try_from(none)?, 0)?;
        Ok(events)
    }

    /// Makes the packet path write events until `time`: CLOCK_MONOTONIC, in nanoseconds.
    pub fn listen_until(&mut self, time: u64) {
        self.config.store(config::monitor_until, time);
    }

    /// Waits for an event, for at most `limit`.
    ///
    /// # Errors
    /// The kernel refuses, or wrote an event that this version does not understand.
    pub fn next(&mut self, limit: Duration) -> Result<Option<MonitorEvent>> {
        if let Some(event) = self.take()? {
            return Ok(Some(event));
        }
        let mut poll = libc::pollfd { fd: self.ring.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let limit = libc::c_int::try_from(limit.as_millis()).unwrap_or(libc::c_int::MAX);
        // SAFETY: there is one descriptor, which lives as long as the ring.
        let polled = unsafe { libc::poll(&raw mut poll, 1, limit) };
        if polled < 0 && Errno::last() != Errno::EINTR {
            bail!("waiting for events failed: {}", Errno::last());
        }
        self.take()
    }

    fn take(&mut self) -> Result<Option<MonitorEvent>> {
        let Some(item) = self.ring.next() else { return Ok(None) };
        if item.len() < size_of::<MonitorEvent>() {
            bail!("an event has {} bytes, this version expects {}", item.len(), size_of::<MonitorEvent>());
        }
        // SAFETY: the item has as many bytes as an event, and any bytes are a valid one.
        Ok(Some(unsafe { item.as_ptr().cast::<MonitorEvent>().read_unaligned() }))
    }

    /// Returns the number of suppressed events that no event has reported yet.
    pub fn suppressed(&self) -> Result<u64> {
        Ok(self.buckets.get(&0, 0)?.iter().map(|bucket| bucket.suppressed).sum())
    }
}
