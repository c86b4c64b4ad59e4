//! Builders for tests, demo and lab.

pub mod script;
