//! The trace of a packet's steps, in copies of the programs that are loaded for `explain`. In other
//! programs nothing of it remains: the verifier removes code that a constant disables.

use aya_ebpf::Global;
use traffic_policy_ebpf::abi::{TRACE_STEPS, TraceStep};

use crate::datapath::{maps::TRACE, value::store};

/// 1 in a traced copy. The agent sets it at load.
#[unsafe(no_mangle)]
static TRACING: Global<u32> = Global::new(0);

/// Whether this is a traced copy, whose packets must not leave the machine.
#[inline(always)]
pub fn is_on() -> bool {
    TRACING.load() != 0
}

/// Notes one step: see [`step`][traffic_policy_ebpf::abi::step].
#[inline(always)]
pub fn note(kind: u32, value: u32, words: [u64; 2]) {
    if TRACING.load() == 0 {
        return;
    }
    let Some(trace) = TRACE.get_ptr_mut(0) else { return };
    let count = get!(trace.count);
    set!(trace.count = count + 1);
    if (count as usize) < TRACE_STEPS {
        let step = place!(mut trace.steps).cast::<TraceStep>().wrapping_add(count as usize);
        store(step, TraceStep { kind, value, words });
    }
}
