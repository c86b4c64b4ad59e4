//! Cost of one packet, by BPF_PROG_TEST_RUN: the packet path and its floors, loaded with maps of
//! their own and fed with the packets of flows. It serves `cargo xtask bench`, and tests that keep
//! its findings.

pub mod companion;
pub mod direct;
pub mod feeder;
pub mod fixture;
pub mod flows;
pub mod frame;
pub mod loaded;
pub mod object;
mod places;
mod service;
pub mod turns;

pub use self::{
    companion::Companion,
    feeder::{Feeder, Hook, Restored, Room, Took, Window},
    fixture::BenchNode,
    flows::{Flow, Kind, Protocol},
    frame::{Content, Frame},
    loaded::{DirectFloor, Loaded, Method, Setup, Subject},
    turns::{Case, Expected},
};
