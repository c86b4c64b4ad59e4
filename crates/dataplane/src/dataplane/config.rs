//! The configuration of the data plane, and the result of a sync.

use std::{path::PathBuf, time::Duration};

use traffic_policy_cluster::model::maglev::TableSize;
use traffic_policy_ebpf::{abi::source_check, tcp::Timeouts};

use super::{
    bpf::{
        attach::{Cgroup, Mode},
        loader::MapSizes,
        pins::OnOtherLayout,
        programs::Selection,
    },
    local_delivery::LocalDelivery,
    pod_services::PodServices,
    sync::{budget::LeftOut, snat_ports::SnatPortRange},
};

/// The idle times after which flows may be removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdleTimes {
    pub established: Duration,
    pub half_closed: Duration,
    pub finished: Duration,
    pub reset: Duration,
    pub unassured: Duration,
    pub udp: Duration,
    pub udp_answered: Duration,
}

impl Default for IdleTimes {
    fn default() -> Self {
        Self {
            established: Duration::from_secs(24 * 3600),
            half_closed: Duration::from_secs(3600),
            finished: Duration::from_secs(120),
            reset: Duration::from_secs(10),
            unassured: Duration::from_secs(60),
            udp: Duration::from_secs(30),
            udp_answered: Duration::from_secs(120),
        }
    }
}

/// The configuration of the data plane.
#[derive(Clone, Debug)]
pub struct Config {
    /// The folder on a bpffs; `None` if nothing outlives this process (tests).
    pub pins: Option<PathBuf>,
    pub on_other_layout: OnOtherLayout,
    pub sizes: MapSizes,
    pub idle: IdleTimes,
    pub snat_ports: SnatPortRange,
    pub drain: Duration,
    pub mode: Mode,
    pub cgroup: Cgroup,
    pub source_check: SourceCheck,
    pub local_delivery: LocalDelivery,
    pub pod_services: PodServices,
    /// The slots of Maglev tables.
    pub table_size: TableSize,
}

impl Config {
    /// Returns the programs that a start needs. `sctp`: whether it serves SCTP; `direct`: whether
    /// it opens packets of other nodes.
    pub(super) fn programs(&self, sctp: bool, direct: bool) -> Selection {
        Selection {
            mode: self.mode,
            sctp,
            direct,
            // They are loaded when the first such device is attached to.
            l3: false,
            sockets: self.cgroup != Cgroup::None,
            pods: self.local_delivery == LocalDelivery::Direct,
            pod_services: self.pod_services == PodServices::On,
        }
    }
}

/// The value of `--source-check`: the sources that new flows may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum SourceCheck {
    Off,
    #[default]
    Martian,
    Strict,
}

impl SourceCheck {
    /// Returns the number in the map, see [`source_check`].
    pub(super) fn number(self) -> u32 {
        match self {
            Self::Off => source_check::OFF,
            Self::Martian => source_check::MARTIAN,
            Self::Strict => source_check::STRICT,
        }
    }
}

/// The result of a sync.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// The number of map elements written or deleted; 0 if the maps held everything already.
    pub elements: usize,
    /// The Service ports for which there was no room, or no program.
    pub left_out: Vec<LeftOut>,
    /// The reason why programs that some of these need are not loaded.
    pub refused: Option<String>,
}

/// The longest idle time, in jiffies. A flow that is idle for more than half of the range of a
/// 32-bit jiffies counter would appear to lie in the future and never be removed; a quarter leaves
/// time for late sweeps. This is 12.4 days at 1000 Hz, and 49.7 days at 250 Hz.
const LONGEST: u32 = u32::MAX / 4;

impl IdleTimes {
    /// Returns the longest idle time that can be represented at `hz` jiffies per second.
    pub(super) fn longest(hz: u32) -> Duration {
        Duration::from_secs(u64::from(LONGEST / hz.max(1)))
    }

    /// Returns the flags of the idle times that are too long to be represented.
    pub(super) fn too_long(&self, hz: u32) -> Vec<&'static str> {
        let times = [
            ("--idle-established", self.established),
            ("--idle-half-closed", self.half_closed),
            ("--idle-finished", self.finished),
            ("--idle-reset", self.reset),
            ("--idle-unassured", self.unassured),
            ("--idle-udp", self.udp),
            ("--idle-udp-answered", self.udp_answered),
        ];
        times.into_iter().filter(|(_, time)| *time > Self::longest(hz)).map(|(flag, _)| flag).collect()
    }

    /// Warns about the idle times that do not hold.
    pub(super) fn warn_of_too_long(&self, hz: u32) {
        for flag in self.too_long(hz) {
            tracing::warn!(
                "{flag} is longer than this kernel's clock can tell: {:?} holds",
                Self::longest(hz)
            );
        }
    }

    /// Converts the idle times for the sweep, with `hz` jiffies per second.
    pub(super) fn in_jiffies(&self, hz: u32) -> Timeouts {
        let jiffies = |time: Duration| {
            let jiffies = time.as_millis() * u128::from(hz) / 1000;
            u32::try_from(jiffies).map_or(LONGEST, |jiffies| jiffies.min(LONGEST))
        };
        Timeouts {
            established: jiffies(self.established),
            half_closed: jiffies(self.half_closed),
            finished: jiffies(self.finished),
            reset: jiffies(self.reset),
            unassured: jiffies(self.unassured),
            udp: jiffies(self.udp),
            udp_answered: jiffies(self.udp_answered),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A 32-bit jiffies counter spans 49.7 days at 1000 Hz, and more than half of that idle time
    /// looks like no time at all.
    #[test]
    fn a_time_that_cannot_be_told_ends_all_the_same() {
        let month = IdleTimes { established: Duration::from_secs(30 * 86_400), ..IdleTimes::default() };
        assert_eq!(month.in_jiffies(1000).established, u32::MAX / 4);
        assert_eq!(month.in_jiffies(250).established, 30 * 86_400 * 250);
        assert_eq!(month.too_long(1000), ["--idle-established"]);
        assert_eq!(month.too_long(250), [""; 0]);
        let ever = IdleTimes { established: Duration::MAX, ..IdleTimes::default() };
        assert_eq!(ever.in_jiffies(100).established, u32::MAX / 4);
        assert_eq!(IdleTimes::default().too_long(1000), [""; 0]);
        let all = IdleTimes {
            established: Duration::MAX,
            half_closed: Duration::MAX,
            finished: Duration::MAX,
            reset: Duration::MAX,
            unassured: Duration::MAX,
            udp: Duration::MAX,
            udp_answered: Duration::MAX,
        };
        assert_eq!(all.too_long(100).len(), 7);
    }
}
