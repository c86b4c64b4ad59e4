//! The packet path: what the programs of `main.rs` are made of.

pub mod barrier;
pub mod clock;
pub mod counters;
pub mod ctx;
pub mod egress;
pub mod events;
pub mod family;
pub mod fast_path;
pub mod flow;
pub mod forward;
pub mod icmp_errors;
pub mod lb;
pub mod maps;
pub mod parse;
pub mod prefilter;
pub mod reject;
pub mod slow_path;
pub mod sock;
pub mod trace;
pub mod variable_headers;
pub mod verdict;
pub mod words;
