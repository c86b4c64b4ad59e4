//! Builders for tests, demo and lab.

pub mod api_server;
pub mod real_api_server;
pub mod script;
