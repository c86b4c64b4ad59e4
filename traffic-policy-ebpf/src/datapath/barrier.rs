//! Single instructions that Rust has no words for on this target: the atomic addition and
//! exchanges, the memory fence, and the optimisation barrier.

use core::arch::asm;

/// Adds to a word of a map that other CPUs add to as well, and returns what it was.
#[inline(always)]
pub fn fetch_add(word: *mut u64, amount: u64) -> u64 {
    let mut value = amount;
    // SAFETY: one atomic instruction. The kernel loads no program in which the word is not an
    // aligned one of a map value.
    unsafe {
        asm!("{v} = atomic_fetch_add((u64 *)({p} + 0), {v})", v = inout(reg) value, p = in(reg) word,
            options(nostack, preserves_flags));
    }
    value
}

/// Sets bits of a word of a map that other CPUs write as well.
#[inline(always)]
pub fn fetch_or(word: *mut u64, bits: u64) {
    let mut value = bits;
    // SAFETY: as in `fetch_add`.
    unsafe {
        asm!("{v} = atomic_fetch_or((u64 *)({p} + 0), {v})", v = inout(reg) value, p = in(reg) word,
            options(nostack, preserves_flags));
    }
    let _ = value;
}

/// Puts another value into a word of a map, and returns what it was: of several CPUs one gets the
/// former value.
#[inline(always)]
pub fn exchange(word: *mut u64, by: u64) -> u64 {
    let mut value = by;
    // SAFETY: as in `fetch_add`.
    unsafe {
        asm!("{v} = xchg_64({p} + 0, {v})", v = inout(reg) value, p = in(reg) word,
            options(nostack, preserves_flags));
    }
    value
}

/// Puts another value into a word of a map if it is what the caller has read: no other CPU has
/// written it meanwhile.
#[inline(always)]
pub fn compare_exchange(word: *mut u64, read: u64, by: u64) {
    // SAFETY: as in `fetch_add`. The instruction compares with register 0, and leaves there what
    // the word was.
    unsafe {
        asm!("r0 = cmpxchg_64({p} + 0, r0, {v})", inout("r0") read => _, v = in(reg) by, p = in(reg) word,
            options(nostack, preserves_flags));
    }
}

/// A full barrier, on every architecture and for the compiler: no load or store of this program
/// moves from one side of it to the other. The one that there is before Linux 6.15 (load-acquire
/// and store-release): an atomic instruction that fetches. 5 ns, so it has no place on the way of
/// an established packet. <https://docs.kernel.org/6.1/bpf/instruction-set.html#atomic-operations>
///
/// `own`: a word of a map value that no other CPU uses; it keeps its value.
#[inline(always)]
pub fn full_fence(own: *mut u64) {
    fetch_add(own, 0);
}

/// Optimisation barrier: the compiler must not know that this is the same number. It then keeps the
/// number, instead of computing it again from where it came: the verifier would not see that a
/// bounds check made for one answer still holds for the same answer.
#[inline(always)]
pub fn opaque(mut value: u64) -> u64 {
    // SAFETY: a register is moved to itself.
    unsafe { asm!("{v} = {v}", v = inout(reg) value, options(pure, nomem, nostack, preserves_flags)) };
    value
}
