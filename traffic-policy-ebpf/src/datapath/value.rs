//! Fields of map values, scratch memory, contexts and ring buffer entries, through raw pointers.
//!
//! Other CPUs and the agent write map values at the same time. So they are read and written field
//! by field, and a reference is made only to memory that has no other writer meanwhile;
//! [`crate::datapath`] lists the kinds of memory.

use core::ptr;

/// Reads a field: `get!(entry.kind)`.
macro_rules! get {
    ($pointer:ident.$($field:tt)+) => {{
        // SAFETY: the kernel loads no program in which, on any path, the pointer is null or of
        // another type of memory, or the field beyond its end. A value that is removed from its map
        // stays readable until the program ends.
        unsafe { (*$pointer).$($field)+ }
    }};
    (($pointer:expr).$($field:tt)+) => {{
        let pointer = $pointer;
        get!(pointer.$($field)+)
    }};
}

/// Writes a field, after computing the value: `set!(entry.kind = kind::REPLY)`,
/// `set!(entry.state |= MARKED)`.
macro_rules! set {
    ($pointer:ident.$($field:ident).+ = $value:expr) => {{
        let value = $value;
        // SAFETY: as for `get!`; the kernel also knows which memory may be written.
        unsafe { (*$pointer).$($field).+ = value };
    }};
    ($pointer:ident.$($field:ident).+[$index:literal] = $value:expr) => {{
        let value = $value;
        // SAFETY: as above.
        unsafe { (*$pointer).$($field).+[$index] = value };
    }};
    ($pointer:ident.$($field:ident).+ += $value:expr) => {{
        let value = $value;
        // SAFETY: as above.
        unsafe { (*$pointer).$($field).+ += value };
    }};
    ($pointer:ident.$($field:ident).+ -= $value:expr) => {{
        let value = $value;
        // SAFETY: as above.
        unsafe { (*$pointer).$($field).+ -= value };
    }};
    ($pointer:ident.$($field:ident).+ &= $value:expr) => {{
        let value = $value;
        // SAFETY: as above.
        unsafe { (*$pointer).$($field).+ &= value };
    }};
    ($pointer:ident.$($field:ident).+ |= $value:expr) => {{
        let value = $value;
        // SAFETY: as above.
        unsafe { (*$pointer).$($field).+ |= value };
    }};
}

/// Returns the address of a field: `place!(mut usage.hops)`, `place!(const usage.hops)`.
macro_rules! place {
    (mut $pointer:ident.$($field:tt)+) => {{
        // SAFETY: nothing is read; as for `get!`, the pointer is to memory that has the field.
        unsafe { &raw mut (*$pointer).$($field)+ }
    }};
    (mut ($pointer:expr).$($field:tt)+) => {{
        let pointer = $pointer;
        place!(mut pointer.$($field)+)
    }};
    (const $pointer:ident.$($field:tt)+) => {{
        // SAFETY: as above.
        unsafe { &raw const (*$pointer).$($field)+ }
    }};
    (const ($pointer:expr).$($field:tt)+) => {{
        let pointer = $pointer;
        place!(const pointer.$($field)+)
    }};
}

/// Returns the address `bytes` bytes after the beginning of a structure.
#[inline(always)]
pub fn after<T>(start: *mut u8, bytes: usize) -> *mut T {
    // SAFETY: as for `place!`.
    unsafe { start.add(bytes) }.cast()
}

/// Returns a reference to memory that only this program writes while it runs: scratch memory, and
/// memory for which the caller vouches.
#[inline(always)]
pub fn borrow<'a, T>(pointer: *const T) -> &'a T {
    // SAFETY: as for `get!`; scratch memory is this CPU's alone (`Family::scratch`).
    unsafe { &*pointer }
}

/// Reads a whole value.
#[inline(always)]
pub fn load<T: Copy>(pointer: *const T) -> T {
    // SAFETY: as for `get!`.
    unsafe { *pointer }
}

/// Writes a whole value.
#[inline(always)]
pub fn store<T: Copy>(pointer: *mut T, value: T) {
    // SAFETY: as for `get!`.
    unsafe { *pointer = value };
}

/// Reads by exactly one load, at this place: memory that another CPU writes meanwhile, or a value
/// that the verifier is to forget.
#[inline(always)]
pub fn load_once<T: Copy>(pointer: *const T) -> T {
    // SAFETY: as for `get!`.
    unsafe { ptr::read_volatile(pointer) }
}

/// Writes by exactly one store, at this place.
#[inline(always)]
pub fn store_once<T: Copy>(pointer: *mut T, value: T) {
    // SAFETY: as for `get!`.
    unsafe { ptr::write_volatile(pointer, value) };
}

/// Reads a value at an address that need not be aligned for it.
#[inline(always)]
pub fn load_unaligned<T: Copy>(pointer: *const T) -> T {
    // SAFETY: as for `get!`.
    unsafe { pointer.read_unaligned() }
}

/// Writes a value to an address that need not be aligned for it.
#[inline(always)]
pub fn store_unaligned<T: Copy>(pointer: *mut T, value: T) {
    // SAFETY: as for `get!`.
    unsafe { pointer.write_unaligned(value) };
}
