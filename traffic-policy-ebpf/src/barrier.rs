//! Single instructions that Rust does not offer on this target: the atomic addition and exchanges,
//! the memory fence, and the optimisation barrier.

use core::arch::asm;

/// Adds to a word of a map that other CPUs also add to, and returns its former value.
#[inline(always)]
pub fn fetch_add(word: *mut u64, amount: u64) -> u64 {
    let mut value = amount;
    // SAFETY: one atomic instruction. The kernel loads no program in which `word` is not an aligned
    // word of a map value.
    unsafe {
        asm!("{v} = atomic_fetch_add((u64 *)({p} + 0), {v})", v = inout(reg) value, p = in(reg) word,
            options(nostack, preserves_flags));
    }
    value
}

/// Sets bits of a word of a map that other CPUs also write.
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

/// Replaces the value of a word of a map, and returns the former value: only one of several CPUs
/// gets it.
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

/// Replaces the value of a word of a map if it still is the value that the caller has read, that
/// is, if no other CPU has written it meanwhile.
#[inline(always)]
pub fn compare_exchange(word: *mut u64, read: u64, by: u64) {
    // SAFETY: as in `fetch_add`. The instruction compares with register 0, and leaves the word's
    // former value there.
    unsafe {
        asm!("r0 = cmpxchg_64({p} + 0, r0, {v})", inout("r0") read => _, v = in(reg) by, p = in(reg) word,
            options(nostack, preserves_flags));
    }
}

/// A full barrier, on every architecture and for the compiler: no load or store of this program
/// moves across it. Before Linux 6.15 (load-acquire and store-release) the only barrier is an
/// atomic instruction that fetches. It costs 5 ns, so it has no place in the path of an established
/// packet. <https://docs.kernel.org/6.1/bpf/instruction-set.html#atomic-operations>
///
/// `own` is a word of a map value that no other CPU uses; it keeps its value.
#[inline(always)]
pub fn full_fence(own: *mut u64) {
    fetch_add(own, 0);
}

/// An optimisation barrier that hides from the compiler that the returned number is the same. The
/// compiler then keeps the number, instead of computing it again from its origin: the verifier
/// would not see that a bounds check of the first result also holds for the second.
#[inline(always)]
pub fn opaque(mut value: u64) -> u64 {
    // SAFETY: a register is moved to itself.
    unsafe { asm!("{v} = {v}", v = inout(reg) value, options(pure, nomem, nostack, preserves_flags)) };
    value
}
