//! The end of every program: the outcome is counted once, and becomes the verdict of XDP or TC.

use core::mem;

use aya_ebpf::cty::c_void;
use traffic_policy_ebpf::{
    abi::{NO_SERVICE, OutcomeCounters, step},
    outcome::{OUTCOMES, Outcome, Verdict},
};

use crate::datapath::{
    counters,
    ctx::Packet,
    family::Family,
    trace,
    value::{load_once, store_once},
};

/// The decision on a packet: an outcome, with the data to carry it out.
#[must_use]
#[derive(Clone, Copy)]
pub struct Decision {
    pub outcome: Outcome,
    /// The verdict that sends the packet, for outcomes that send.
    pub action: i32,
    /// The MTU in bytes, for [`Outcome::RejectedMtuExceeded`].
    pub mtu: u32,
    /// The index of the Service port that refused the packet, or [`NO_SERVICE`]. The program that
    /// answers reads it.
    pub service: u32,
}

impl From<Outcome> for Decision {
    #[inline(always)]
    fn from(outcome: Outcome) -> Self {
        Self { outcome, action: 0, mtu: 0, service: NO_SERVICE }
    }
}

impl Decision {
    #[inline(always)]
    pub fn sent(outcome: Outcome, action: i32) -> Self {
        Self { outcome, action, mtu: 0, service: NO_SERVICE }
    }

    #[inline(always)]
    pub fn refused(outcome: Outcome, service: u32) -> Self {
        Self { outcome, action: 0, mtu: 0, service }
    }

    /// Whether the program itself answers the sender.
    #[inline(always)]
    pub fn is_answered(self) -> bool {
        matches!(
            self.outcome,
            Outcome::RejectedNoEndpoint
                | Outcome::RejectedUnknownPort
                | Outcome::RejectedTtlExceeded
                | Outcome::RejectedMtuExceeded
                | Outcome::ResetNoFlow
        )
    }
}

/// Returns the decision with an outcome that was read back from scratch memory. The verifier knows
/// the outcome of each way to the end of a program, and would walk the end once for each of them;
/// of a number in a map's value it knows nothing.
#[inline(always)]
pub fn forget<F: Family>(decision: Decision) -> Decision {
    let Some(scratch) = F::scratch() else { return Outcome::DroppedInternalError.into() };
    store_once(place!(mut scratch.outcome), decision.outcome as u32);
    // The mask changes nothing: it is the bound that the verifier wants where it is an index.
    let number = load_once(place!(const scratch.outcome)) & (OUTCOMES - 1);
    // SAFETY: it is the number of an outcome, written above by this CPU.
    Decision { outcome: unsafe { mem::transmute::<u32, Outcome>(number) }, ..decision }
}

/// Counts the outcome and translates it for the kernel.
#[inline(always)]
pub fn finish<P: Packet>(packet: P, hook: u32, decision: Decision) -> i32 {
    finish_with(packet, hook, counters::of_hook(hook), decision)
}

/// Finishes as [`finish`] does, with counters that were looked up before.
#[inline(always)]
pub fn finish_with<P: Packet>(
    packet: P,
    hook: u32,
    counters: *mut OutcomeCounters,
    decision: Decision,
) -> i32 {
    log(packet.raw(), hook, decision.outcome as u32);
    trace::note(step::OUTCOME, decision.outcome as u32, [hook as u64, 0]);
    counters::count(counters, decision.outcome);
    match decision.outcome.verdict() {
        Verdict::Pass => P::PASS,
        Verdict::Drop => P::DROP,
        Verdict::Send => decision.action,
    }
}

/// Logs the outcome, in builds with the feature `log`; in others nothing of it remains. It is a
/// function of its own because the stack of `slow_path` has little room.
#[cfg(feature = "log")]
#[inline(never)]
fn log(context: *mut c_void, hook: u32, outcome: u32) {
    struct Context(*mut c_void);
    impl aya_ebpf::EbpfContext for Context {
        fn as_ptr(&self) -> *mut c_void {
            self.0
        }
    }
    aya_log_ebpf::info!(&Context(context), "hook {}: outcome {}", hook, outcome);
}

#[cfg(not(feature = "log"))]
#[inline(always)]
fn log(_: *mut c_void, _: u32, _: u32) {}
