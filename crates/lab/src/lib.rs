//! The scenes of the demo, which tests play, too.

#![forbid(unsafe_code)]

pub mod demo;
