//! Configuration of the data plane, and the result of a sync.

use std::{path::PathBuf, time::Duration};

use traffic_policy_ebpf::tcp::Timeouts;

use super::{
    bpf::{
        attach::{Cgroup, Mode},
        loader::Sizes,
    },
    sync::snat_ports::Wanted as Pool,
};
use crate::model::ServicePortKey;

/// Idle times after which flows may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdleTimes {
    pub established: Duration,
    pub finished: Duration,
    pub reset: Duration,
    pub unconfirmed: Duration,
    pub udp: Duration,
    pub udp_answered: Duration,
}

impl Default for IdleTimes {
    fn default() -> Self {
        Self {
            established: Duration::from_secs(24 * 3600),
            finished: Duration::from_secs(120),
            reset: Duration::from_secs(10),
            unconfirmed: Duration::from_secs(60),
            udp: Duration::from_secs(30),
            udp_answered: Duration::from_secs(120),
        }
    }
}

/// How the data plane is set up.
#[derive(Clone, Debug)]
pub struct Config {
    /// Folder on a bpffs; `None`: nothing outlives this process (tests).
    pub pins: Option<PathBuf>,
    pub sizes: Sizes,
    pub idle: IdleTimes,
    pub pool: Pool,
    pub drain: Duration,
    pub mode: Mode,
    pub cgroup: Cgroup,
}

/// What a sync did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Map elements written or deleted; 0 if the maps held everything already.
    pub elements: usize,
    /// Service ports for which there was no room.
    pub no_room: Vec<ServicePortKey>,
}

impl IdleTimes {
    /// As the sweep takes them, with `hz` jiffies to the second.
    pub(super) fn in_jiffies(&self, hz: u32) -> Timeouts {
        let jiffies =
            |time: Duration| u32::try_from(time.as_millis() * u128::from(hz) / 1000).unwrap_or(u32::MAX / 2);
        Timeouts {
            established: jiffies(self.established),
            finished: jiffies(self.finished),
            reset: jiffies(self.reset),
            unconfirmed: jiffies(self.unconfirmed),
            udp: jiffies(self.udp),
            udp_answered: jiffies(self.udp_answered),
        }
    }
}
