//! Global functions, which the verifier walks by themselves once for each program that calls them
//! (`do_check_subprogs`), and not once for each state that a caller may be in. Arguments are passed
//! in scratch memory, as one pointer, which may be the program's context, or as numbers; neither of
//! those nor of the result, a number, the verifier knows any bounds.
//!
//! The kernel recognises them by their linkage in BTF. None is called for an established packet.
//! <https://github.com/torvalds/linux/blob/v6.1/kernel/bpf/verifier.c>

/// Defines global functions: `name => function;`, or `name => function, argument: type, …;`. To the
/// verifier a pointer argument may be null.
macro_rules! global_functions {
    ($($name:ident => $run:path $(, $argument:ident: $type:ty)*;)+) => {
        $(
            #[unsafe(no_mangle)]
            #[inline(never)]
            extern "C" fn $name($($argument: $type),*) -> i32 {
                $run($($argument),*)
            }
        )+
    };
}
