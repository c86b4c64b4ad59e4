//! The programs of SCTP, a third of what the verifier walks: they are loaded before the first
//! frontend of SCTP is written. Until then small programs stand in for those of incoming packets,
//! and the others are missing, as [`programs`] lists them.
//!
//! They stay when the last Service of SCTP goes, and an agent that takes over maps with them, or
//! with frontends of SCTP, loads its own at its start: associations outlive both.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use aya::Ebpf;
use traffic_policy_cluster::model::{Changes, Desired, Protocol};
use traffic_policy_ebpf::abi::jump;

use super::{
    bpf::programs::{self, Selection},
    maps::{Maps, reader::Reader},
    sync::{op::Held, plan::Planner},
};

/// The delay before programs that the kernel has refused are loaded again, which doubles each time.
const FIRST_RETRY: Duration = Duration::from_secs(5);
const LAST_RETRY: Duration = Duration::from_secs(300);

/// Whether the programs of SCTP are in place, and why not.
#[derive(Debug)]
pub(super) enum Sctp {
    InPlace,
    /// Nothing needs them.
    NotLoaded,
    Refused {
        why: String,
        again: Instant,
        delay: Duration,
    },
}

impl Sctp {
    /// Returns what a start has loaded.
    pub(super) fn loaded(in_place: bool) -> Self {
        if in_place { Self::InPlace } else { Self::NotLoaded }
    }

    pub(super) fn is_in_place(&self) -> bool {
        matches!(self, Self::InPlace)
    }

    /// Returns the reason why the programs are not in place although Services need them.
    pub(super) fn refusal(&self) -> Option<&str> {
        if let Self::Refused { why, .. } = self { Some(why) } else { None }
    }

    /// Loads the programs and puts them in place, unless they are, or the kernel has refused them
    /// lately. A failure is logged.
    pub(super) fn ensure(&mut self, object: &mut Ebpf, maps: &mut Maps, programs: &mut Selection) {
        let delay = match self {
            Self::InPlace => return,
            Self::NotLoaded => FIRST_RETRY,
            Self::Refused { again, .. } if Instant::now() < *again => return,
            Self::Refused { delay, .. } => (*delay * 2).min(LAST_RETRY),
        };
        let start = Instant::now();
        let wanted = Selection { sctp: true, ..*programs };
        *self = match programs::extend(object, maps, programs, wanted) {
            Ok(number) => {
                tracing::info!(programs = number, ms = start.elapsed().as_millis(), "SCTP is served");
                Self::InPlace
            }
            Err(error) => {
                let why = format!("{error:#}");
                tracing::error!(
                    "SCTP is not served, its programs are loaded again in {} s: {why}",
                    delay.as_secs()
                );
                Self::Refused { why, again: Instant::now() + delay, delay }
            }
        };
    }
}

/// Whether a start needs the programs, by the content of pinned maps. `folder`: their pins.
pub(super) fn is_served(held: &Held, folder: Option<&Path>) -> bool {
    let in_place = |folder: &Path| {
        let jumps = Reader::open(folder, programs::TC_CALLS);
        // An element without a program cannot be read.
        jumps.and_then(|jumps| jumps.value::<u32>(jump::SCTP_OUT)).is_ok()
    };
    held.frontends.keys().any(|id| id.protocol == Protocol::Sctp) || folder.is_some_and(in_place)
}

/// Whether a plan for these changes may write frontends of SCTP.
pub(super) fn is_concerned(desired: &Desired, changes: &Changes, planner: &Planner) -> bool {
    if planner.is_first() {
        desired.ports.keys().any(|key| key.protocol == Protocol::Sctp)
    } else {
        let mut keys = changes.ports.iter();
        keys.any(|key| key.protocol == Protocol::Sctp && desired.ports.contains_key(key))
    }
}
