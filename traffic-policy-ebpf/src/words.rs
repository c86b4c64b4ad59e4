//! Packet words: loads and stores of 8 to 64 bits at unaligned addresses.
//!
//! Packet words are not aligned for Rust's references and pointer reads; `read_unaligned` compiles
//! to byte loads and shifts (3 ns a packet more). One instruction each, in assembly, is neither
//! undefined nor slow.
//!
//! The loads and stores also serve contexts whose fields may be accessed only by single
//! instructions at constant offsets.

use core::arch::asm;

macro_rules! load {
    ($name:ident, $size:literal, $type:ty) => {
        /// Loads the word `OFFSET` bytes after `at`.
        #[inline(always)]
        pub fn $name<const OFFSET: i16>(at: usize) -> $type {
            let value: u64;
            // SAFETY: one load. The kernel loads no program in which, on any path, the end of the
            // word has not been compared with the end of the packet since the last call that may
            // move it.
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
        #[inline(always)]
        pub fn $name<const OFFSET: i16>(at: usize, value: $type) {
            // SAFETY: one store; as for loads.
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
