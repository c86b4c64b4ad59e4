//! Builders for tests, demo and lab.
