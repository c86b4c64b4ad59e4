//! A node as its operator sees it: `status`, `services`, `flows`, `monitor`, `/configz`, systemd.
//! Real agents, real traffic. Needs root; without it each test fails with an explanation.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod bugtool;
mod configured;
mod counts;
mod flows;
mod loaded;
mod monitor;
mod outside;
mod prefilter;
mod services;
mod status;
mod systemd;
