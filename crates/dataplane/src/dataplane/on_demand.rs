//! Programs that are loaded once something needs them: those of SCTP, and those that open packets
//! of other nodes. Until then nothing is in their places, or small programs stand in.

use std::time::{Duration, Instant};

use aya::Ebpf;

use super::{
    bpf::programs::{self, Selection},
    maps::Maps,
};

/// The delay before programs that the kernel has refused are loaded again, which doubles each time.
const FIRST_RETRY: Duration = Duration::from_secs(5);
const LAST_RETRY: Duration = Duration::from_secs(300);

/// Whether some programs are in place, and why not.
#[derive(Debug)]
pub(super) enum OnDemand {
    InPlace,
    /// Nothing needs them.
    NotLoaded,
    Refused {
        why: String,
        again: Instant,
        delay: Duration,
    },
}

impl OnDemand {
    /// Returns what a start has loaded.
    pub(super) fn loaded(in_place: bool) -> Self {
        if in_place { Self::InPlace } else { Self::NotLoaded }
    }

    pub(super) fn is_in_place(&self) -> bool {
        matches!(self, Self::InPlace)
    }

    /// Returns the reason why the programs are not in place although something needs them.
    pub(super) fn refusal(&self) -> Option<&str> {
        if let Self::Refused { why, .. } = self { Some(why) } else { None }
    }

    /// Loads the programs and puts them in place, unless they are, or the kernel has refused them
    /// lately. A failure is logged. `with_them`: all that is to be in place then. `done` and
    /// `refused`: the line of the log in either case.
    pub(super) fn ensure(
        &mut self,
        (object, maps, programs): (&mut Ebpf, &mut Maps, &mut Selection),
        with_them: impl FnOnce(Selection) -> Selection,
        [done, refused]: [&str; 2],
    ) {
        let delay = match self {
            Self::InPlace => return,
            Self::NotLoaded => FIRST_RETRY,
            Self::Refused { again, .. } if Instant::now() < *again => return,
            Self::Refused { delay, .. } => (*delay * 2).min(LAST_RETRY),
        };
        let start = Instant::now();
        let wanted = with_them(*programs);
        *self = match programs::extend(object, maps, programs, wanted) {
            Ok(number) => {
                tracing::info!(programs = number, ms = start.elapsed().as_millis(), "{done}");
                Self::InPlace
            }
            Err(error) => {
                let why = format!("{error:#}");
                tracing::error!("{refused}, the programs are loaded again in {} s: {why}", delay.as_secs());
                Self::Refused { why, again: Instant::now() + delay, delay }
            }
        };
    }
}
