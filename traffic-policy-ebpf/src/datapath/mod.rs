//! The packet path: what the programs of `main.rs` are made of.

pub mod barrier;
pub mod clock;
pub mod counters;
pub mod ctx;
pub mod egress;
pub mod error;
pub mod events;
pub mod extension;
pub mod family;
pub mod fast_path;
pub mod flow;
pub mod forward;
pub mod fragment;
pub mod irregular;
pub mod lb;
pub mod maps;
pub mod parse;
pub mod prefilter;
pub mod question;
pub mod reject;
pub mod slow_path;
pub mod socket;
pub mod trace;
pub mod verdict;
pub mod words;
