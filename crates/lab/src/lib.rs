//! The demo's scenes, which tests play, too.

#![forbid(unsafe_code)]

pub mod demo;
