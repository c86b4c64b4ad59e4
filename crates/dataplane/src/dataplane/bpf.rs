//! The compiled programs: loaded, verified, pinned, attached and run.

pub mod attach;
pub mod error;
pub mod frags;
pub mod introspect;
pub mod loader;
#[cfg(feature = "log")]
pub mod log;
pub mod object;
pub mod pins;
pub mod programs;
pub mod test_context;
pub mod test_run;
pub mod verifier;
