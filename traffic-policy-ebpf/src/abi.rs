//! Layouts of the maps.
//!
//! Words from packets stay as they lie in memory (network byte order, loaded natively): the packet
//! path compares and stores them and seldom needs their numeric value. Addresses and ports are
//! types of their own, so that they cannot be confused with a number in host order. Each type is
//! free of implicit padding where its bytes are compared. A change of any layout raises
//! [`ABI_VERSION`], which is part of the pin path.

mod address;
mod affinity;
mod client_hop;
mod direct;
mod endpoint;
mod event;
mod flow;
mod flow_key;
mod fragment;
mod frontends;
mod heartbeat;
mod local_node;
pub mod maglev;
mod nexthop;
mod node_silence;
#[cfg(all(feature = "user", not(target_arch = "bpf")))]
mod pod;
mod pod_device;
pub mod prefilter;
mod programs;
mod route_config;
mod route_mtu;
mod runtime_config;
mod scratch;
mod service;
mod slot_route;
mod socket;
mod sweep;
mod table_usage;
mod trace;
mod tuple;

use core::mem::{align_of, offset_of, size_of};

pub use self::{
    address::{Address, Address4, Address6, Fold, Multipliers, WideAddress},
    affinity::{Affinity, AffinityKey, client},
    client_hop::{CLIENT_HOPS, ClientHop, ClientHops},
    direct::{
        BY_MAC, BY_TABLE, DIRECT_NODES, DirectEndpoint, DirectEndpointKey, DirectNode, GUE_PORT, MAC_TAKES,
        REPLY_THROUGH_FRONT, TO_OWNER, WayBack, identification, is_outer_port, mac_key, number_of,
        outer_port, way,
    },
    endpoint::{
        EndpointKey, REMOVED_FROM_OPENING, REMOVED_FROM_SERVICE, SLOT_HELD, SLOT_L2, SLOT_LOCAL, SLOT_OPENS,
        SLOT_REMOTE, SLOT_UDP, Slot,
    },
    event::{EventBucket, MonitorEvent},
    flow::{DeviceOrPlace, Flow, Head, Packets, Tail, Window, kind},
    flow_key::FlowKey,
    fragment::{Fragment, FragmentKey, IGNORED, Piece, REASSEMBLY},
    frontends::{
        Frontend, FrontendKey, IndexRange, ServiceCidr, ServiceCidrQuery, SourceQuery, SourceRange, frontend,
        frontend_kind, scope,
    },
    heartbeat::AgentHeartbeat,
    local_node::{LocalNode, source_check},
    nexthop::{
        DEVICE_XDP, DeviceInfo, HOP_L2, HOP_NO_ETHERNET, HOP_POD, HOP_ROUTED, HOP_XDP, HOPS,
        HOPS_PER_GENERATION, Hop, HopKey, POD_KEY,
    },
    node_silence::{HOP_PLACES, NODE_NAME_LENGTH, NodeSilence, Suspicion},
    pod_device::{PodDevice, pod_flags},
    prefilter::{CIDRS, PORT_WORDS, Prefilter, PrefilterCidr, SERVICE_WORDS, ServiceBits},
    programs::{OutcomeCounters, RejectBucket, hook, jump},
    route_config::RouteConfig,
    route_mtu::{RoutePrefix, RouteQuery},
    runtime_config::RuntimeConfig,
    scratch::{
        AffinityLookup, BY_FLOW, BY_POD, ExtensionWalk, FibQuery, Opened, Outer, OwnerSearch, PortSearch,
        Scratch, Via,
    },
    service::{NAME_LENGTH, NO_SERVICE, ServiceCount, ServiceCountKey, ServiceInfo, policy},
    slot_route::{HOP_LOCAL, SlotRoute},
    socket::{SocketKey, TranslatedSocket},
    sweep::{Sweep, mark},
    table_usage::{NO_PORT_PLACES, TableUsage},
    trace::{
        AffinityMatch, FilterMatch, ListKind, PacketTrace, RangeMatch, RouteKind, SocketQuestion,
        TRACE_STEPS, TraceStep, step,
    },
    tuple::{PROTOCOL_SCTP, PROTOCOL_TCP, PROTOCOL_UDP, Port, Ports, Tuple},
};

/// The version of all layouts of this module.
pub const ABI_VERSION: u32 = 14;

const _: () = {
    assert!(size_of::<Port>() == 2 && align_of::<Port>() == 2);
    assert!(size_of::<Ports>() == 4 && align_of::<Ports>() == 4);
    assert!(size_of::<Tuple<Address4>>() == 16);
    assert!(size_of::<Tuple<Address6>>() == 40);
    // Together with the kernel's 48 bytes: two cache lines.
    assert!(48 + size_of::<FlowKey<Address4>>() + size_of::<Flow<Address4>>() == 128);
    assert!(size_of::<Flow<Address6>>() == 104);
    assert!(offset_of!(Flow<Address4>, numbers) % 8 == 0 && offset_of!(Flow<Address6>, numbers) % 8 == 0);
    assert!(offset_of!(Flow<Address4>, hop) % 4 == 0 && offset_of!(Flow<Address6>, hop) % 4 == 0);
    assert!(offset_of!(Flow<Address4>, epoch) == offset_of!(Flow<Address4>, hop) + 2);
    assert!(offset_of!(Flow<Address6>, epoch) == offset_of!(Flow<Address6>, hop) + 2);
    assert!(size_of::<FrontendKey<Address4>>() == 12);
    assert!(size_of::<FrontendKey<Address6>>() == 24);
    assert!(size_of::<Frontend>() == 72);
    assert!(size_of::<DirectEndpointKey<Address4>>() == 12);
    assert!(size_of::<DirectEndpointKey<Address6>>() == 24);
    assert!(size_of::<DirectNode<Address4>>() == 16);
    assert!(size_of::<DirectNode<Address6>>() == 40);
    assert!(size_of::<SourceQuery<Address4>>() == 4 + size_of::<SourceRange<1>>());
    assert!(size_of::<SourceQuery<Address6>>() == 4 + size_of::<SourceRange<4>>());
    assert!(size_of::<ServiceCidrQuery<Address4>>() == 4 + size_of::<ServiceCidr<1>>());
    assert!(size_of::<ServiceCidrQuery<Address6>>() == 4 + size_of::<ServiceCidr<4>>());
    assert!(size_of::<RouteQuery<Address4>>() == 8 + size_of::<RoutePrefix<1>>());
    assert!(size_of::<RouteQuery<Address6>>() == 8 + size_of::<RoutePrefix<4>>());
    assert!(size_of::<Slot<Address4>>() == 12);
    assert!(size_of::<Slot<Address6>>() == 24);
    assert!(size_of::<SlotRoute<Address4>>() == 12);
    assert!(size_of::<SlotRoute<Address6>>() == 24);
    assert!(size_of::<ClientHop<Address4>>() == 24);
    assert!(size_of::<ClientHop<Address6>>() == 48);
    assert!(size_of::<Hop>() == 32 && align_of::<Hop>() == 8);
    assert!(size_of::<HopKey>() == 24);
    assert!(size_of::<DeviceInfo>() == 40);
    assert!(size_of::<PodDevice>() == 16);
    assert!(size_of::<RuntimeConfig>() == 64);
    assert!(size_of::<NodeSilence>() == 16);
    assert!(size_of::<TableUsage>() == 640);
    assert!(size_of::<EndpointKey>() == 24);
    assert!(size_of::<AffinityKey>() == 24);
    assert!(size_of::<Affinity>() == 32);
    assert!(size_of::<SocketKey>() == 32);
    assert!(size_of::<TranslatedSocket>() == 40);
    assert!(size_of::<LocalNode>() == 184);
    assert!(size_of::<MonitorEvent>() == 96);
    assert!(size_of::<FragmentKey<Address4>>() == 16);
    assert!(size_of::<FragmentKey<Address6>>() == 40);
    assert!(size_of::<Fragment>() == 16);
};
