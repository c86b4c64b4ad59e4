//! Layouts of the maps.
//!
//! Words taken from packets stay as they lie in memory (network byte order, loaded natively): the packet path compares
//! and stores them and seldom needs their numeric value. Addresses and ports are types of their own, which no number in host order
//! is taken for. Each type is free of implicit padding where its bytes are
//! compared. A change of any layout raises [`ABI_VERSION`], which is part of the pin path.

mod address;
mod affinity;
mod agent;
mod endpoint;
mod event;
mod flow;
mod flow_key;
mod fragment;
mod frontends;
mod nexthop;
#[cfg(all(feature = "user", not(target_arch = "bpf")))]
mod pod;
mod prefilter;
mod programs;
mod scratch;
mod service;
mod slot_route;
mod socket;
mod state;
mod sweep;
mod trace;
mod tuple;

use core::mem::{align_of, offset_of, size_of};

pub use self::{
    address::{Address, Address4, Address6, Fold},
    affinity::{Affinity, AffinityKey, client},
    agent::Agent,
    endpoint::{EndpointKey, SLOT_LOCAL, SLOT_REMOTE, Slot},
    event::{Event, EventBucket},
    flow::{Flow, kind},
    flow_key::FlowKey,
    fragment::{Fragment, FragmentKey, REASSEMBLY},
    frontends::{
        Cidr, CidrQuery, Frontend, FrontendKey, Range, SourceQuery, SourceRange, frontend, frontend_kind,
        scope,
    },
    nexthop::{Device, HOP_XDP, HOPS, HOPS_PER_GENERATION, Hop, HopKey},
    prefilter::{Filter, PORT_WORDS},
    programs::{Bucket, Counters, hook, jump},
    scratch::{AffinityLookup, PortSearch, Scratch, Walked},
    service::{NAME_LENGTH, NO_SERVICE, ServiceCount, ServiceCountKey, ServiceInfo, policy},
    slot_route::{HOP_LOCAL, SlotRoute},
    socket::{Node, Socket, SocketKey, source_check},
    state::{State, Usage},
    sweep::{Sweep, mark},
    trace::{STEPS, SocketQuestion, Step, Trace, list, step},
    tuple::{PROTOCOL_TCP, PROTOCOL_UDP, Port, Ports, Tuple},
};

/// Version of all layouts below.
pub const ABI_VERSION: u32 = 3;

const _: () = {
    assert!(size_of::<Port>() == 2 && align_of::<Port>() == 2);
    assert!(size_of::<Ports>() == 4 && align_of::<Ports>() == 4);
    assert!(size_of::<Tuple<Address4>>() == 16);
    assert!(size_of::<Tuple<Address6>>() == 40);
    // Two cache lines with the kernel's 48 bytes.
    assert!(48 + size_of::<FlowKey<Address4>>() + size_of::<Flow<Address4>>() == 128);
    assert!(size_of::<Flow<Address6>>() == 104);
    assert!(offset_of!(Flow<Address4>, numbers) % 8 == 0 && offset_of!(Flow<Address6>, numbers) % 8 == 0);
    assert!(offset_of!(Flow<Address4>, hop) % 4 == 0 && offset_of!(Flow<Address6>, hop) % 4 == 0);
    assert!(offset_of!(Flow<Address4>, epoch) == offset_of!(Flow<Address4>, hop) + 2);
    assert!(offset_of!(Flow<Address6>, epoch) == offset_of!(Flow<Address6>, hop) + 2);
    assert!(size_of::<FrontendKey<Address4>>() == 12);
    assert!(size_of::<FrontendKey<Address6>>() == 24);
    assert!(size_of::<Frontend>() == 40);
    assert!(size_of::<SourceQuery<Address4>>() == 4 + size_of::<SourceRange<1>>());
    assert!(size_of::<SourceQuery<Address6>>() == 4 + size_of::<SourceRange<4>>());
    assert!(size_of::<CidrQuery<Address4>>() == 4 + size_of::<Cidr<1>>());
    assert!(size_of::<CidrQuery<Address6>>() == 4 + size_of::<Cidr<4>>());
    assert!(size_of::<Slot<Address4>>() == 12);
    assert!(size_of::<Slot<Address6>>() == 24);
    assert!(size_of::<SlotRoute<Address4>>() == 12);
    assert!(size_of::<SlotRoute<Address6>>() == 24);
    assert!(size_of::<Hop>() == 32 && align_of::<Hop>() == 8);
    assert!(size_of::<HopKey>() == 24);
    assert!(size_of::<Device>() == 40);
    assert!(size_of::<State>() == 64);
    assert!(size_of::<Usage>() == 128);
    assert!(size_of::<EndpointKey>() == 24);
    assert!(size_of::<AffinityKey>() == 24);
    assert!(size_of::<Affinity>() == 32);
    assert!(size_of::<SocketKey>() == 32);
    assert!(size_of::<Socket>() == 40);
    assert!(size_of::<Node>() == 120);
    assert!(size_of::<Event>() == 96);
    assert!(size_of::<FragmentKey<Address4>>() == 16);
    assert!(size_of::<FragmentKey<Address6>>() == 40);
    assert!(size_of::<Fragment>() == 16);
};
