//! Loads and stores of packet words.
//!
//! Packet words are not aligned for Rust's references and pointer reads; `read_unaligned` compiles to byte loads and
//! shifts (3 ns a packet more). One instruction each, in assembly, is neither undefined nor slow.

use core::arch::asm;

macro_rules! load {
    ($name:ident, $size:literal, $type:ty) => {
        /// Loads the word `OFFSET` bytes after `at`.
        ///
        /// # Safety
        /// The caller has compared the end of the word with the end of the packet.
        #[inline(always)]
        pub unsafe fn $name<const OFFSET: i16>(at: usize) -> $type {
            let value: u64;
            unsafe {
                asm!(concat!("{v} = *(", $size, " *)({p} + {o})"), v = out(reg) value, p = in(reg) at,
                    o = const OFFSET, options(nostack, readonly, preserves_flags));
            }
            value as $type
        }
    };
}

macro_rules! store {
    ($name:ident, $size:literal, $type:ty) => {
        /// Stores a word `OFFSET` bytes after `at`.
        ///
        /// # Safety
        /// The caller has compared the end of the word with the end of the packet.
        #[inline(always)]
        pub unsafe fn $name<const OFFSET: i16>(at: usize, value: $type) {
            unsafe {
                asm!(concat!("*(", $size, " *)({p} + {o}) = {v}"), v = in(reg) value as u64, p = in(reg) at,
                    o = const OFFSET, options(nostack, preserves_flags));
            }
        }
    };
}

load!(load8, "u8", u8);
load!(load16, "u16", u16);
load!(load32, "u32", u32);
load!(load64, "u64", u64);
store!(store8, "u8", u8);
store!(store16, "u16", u16);
store!(store32, "u32", u32);
store!(store64, "u64", u64);

/// Adds to a word of a map that other CPUs add to as well, and returns what it was.
///
/// # Safety
/// `word` points into a map value, aligned.
#[inline(always)]
pub unsafe fn fetch_add(word: *mut u64, amount: u64) -> u64 {
    let mut value = amount;
    unsafe {
        asm!("{v} = atomic_fetch_add((u64 *)({p} + 0), {v})", v = inout(reg) value, p = in(reg) word,
            options(nostack, preserves_flags));
    }
    value
}

/// A full barrier, on every architecture and for the compiler: no load or store of this program moves from one side of it to
/// the other. The one that there is before Linux 6.15 (load-acquire and store-release): an atomic instruction that fetches.
/// 5 ns, so it has no place on the way of an established packet.
/// <https://docs.kernel.org/6.1/bpf/instruction-set.html#atomic-operations>
///
/// # Safety
/// `own` is an aligned word of a map value that no other CPU uses; it keeps its value.
#[inline(always)]
pub unsafe fn full_fence(own: *mut u64) {
    unsafe { fetch_add(own, 0) };
}

/// The same number, of which the compiler knows nothing. It then keeps the number, instead of computing it again from
/// where it came: the verifier would not see that a bounds check made for one answer still holds for the same answer.
#[inline(always)]
pub fn opaque(mut value: u64) -> u64 {
    unsafe { asm!("{v} = {v}", v = inout(reg) value, options(pure, nomem, nostack, preserves_flags)) };
    value
}
