//! The packet path as the agent sees it: maps, programs, devices. The only module of this crate
//! that uses `aya`; `unsafe` is here, and for one structure of C in [`node`][crate::node].
//!
//! [`Dataplane`] has the state. What the run loop does with it is in traits, one for each role
//! ([`ServiceMaps`], [`DevicePrograms`], …), each in the file of what it is about;
//! [`PacketPath`] is all of them.

mod adoption;
pub mod bpf;
pub mod clock;
mod config;
mod conntrack_windows;
pub mod counters;
mod devices;
pub mod direct;
mod heartbeat;
pub mod kernel;
mod local_delivery;
pub mod maps;
mod nexthop;
mod node;
mod node_silence;
mod on_demand;
mod packet_path;
mod pod_devices;
mod pod_services;
pub mod privileges;
mod replacement;
mod rivals;
mod route_mtus;
mod sctp;
mod sctp_divider;
mod service_maps;
mod sockets;
mod start;
pub mod sweep;
pub mod sync;
pub mod sys;
pub mod tracing_copy;
mod usage;
pub mod veth_peer;

use aya::Ebpf;

pub(crate) use self::node_silence::hop_address;
pub use self::{
    adoption::{Adopted, ConnectionAdoption, adopt_pinned},
    bpf::{
        attach::{Attached, Cgroup, Interface, Mode, drivers},
        introspect,
        loader::{MapSizes, load, load_seeded},
        object::object_bytes,
        pins::{DEFAULT as DEFAULT_PINS, Look as PinsLook, OnOtherLayout, Removed},
        programs::{jump_table, jumps, jumps_without_opening, jumps_without_sctp, load_programs},
        test_context::{sk_buff, xdp_md},
        verifier::{Refusal, try_programs},
    },
    clock::monotonic,
    config::{Config, IdleTimes, SourceCheck, Written},
    conntrack_windows::{is_strict as is_conntrack_strict, obstacle as conntrack_obstacle},
    counters::Counter,
    devices::{DevicePrograms, Lost, pinned_devices},
    kernel::{Kernel, is_mistaken as mistakes_the_kernel, release_memory, return_large_blocks},
    local_delivery::LocalDelivery,
    maps::{
        Maps,
        keys::{
            FromWire, FrontendId, Removal, RemovedEndpoint, ToWire, endpoint_key, from_wide, number, wide,
        },
        reader::MapInfo,
        words::Words,
    },
    nexthop::{Changed, NextHop, NextHops},
    node::NodeDescription,
    node_silence::{NodeSilence, Suspect},
    packet_path::PacketPath,
    pod_devices::{Followed, JudgedPod, PodPrograms, judged_below as judged_pods},
    pod_services::PodServices,
    privileges::{Extras, check_privileges, drop_privileges, effective_capabilities, missing_privileges},
    replacement::{Replaced, Replacement},
    sctp_divider::SctpReplies,
    service_maps::ServiceMaps,
    sockets::{CgroupPrograms, ReadConnected},
    start::cleanup,
    sweep::{
        milestones::enter as enter_milestones,
        sweeper::{Found, Sweeper},
        sweeps::FlowSweeps,
    },
    sync::budget::{Lack, LeftOut},
    sync::snat_ports::{
        LEAST as LEAST_SNAT_PORTS, PortRanges, SnatPortRange, SnatPorts, ephemeral as ephemeral_ports,
        ranges as port_ranges, reserved as reserved_ports,
    },
    usage::{DataplaneUsage, Figures, MapUsage},
};
use self::{bpf::pins::Pins, devices::Devices, sockets::Sockets, sweep::Sweeps, sync::plan::Planner};
use crate::node::RouteMtus;

/// The loaded packet path.
pub struct Dataplane {
    object: Ebpf,
    maps: Maps,
    planner: Planner,
    /// Whether a sync has failed since the planner was given the content of the maps.
    stale: bool,
    sweeps: Sweeps,
    devices: Devices,
    sockets: Sockets,
    /// Whether the prefilter may hold bits of Services that no longer exist.
    needs_prune: bool,
    /// The sizes of the maps by the flags that would set them.
    sizes: Vec<(&'static str, u32)>,
    config: Config,
    pins: Option<Pins>,
    /// Whether the links of another layout version have been taken over.
    adopted: bool,
    named: node::Named,
    silence: node_silence::Silence,
    direct: direct::Direct,
    sctp: on_demand::OnDemand,
    divider: sctp_divider::Divider,
    /// The programs that open packets of other nodes.
    opening: on_demand::OnDemand,
    /// The programs in place.
    programs: bpf::programs::Selection,
    pods: pod_devices::PodDevices,
    /// The MTUs of routes as the maps hold them; `None` if they are unknown.
    route_mtus: Option<RouteMtus>,
    adoption: adoption::Adoption,
}

impl Dataplane {
    /// Returns the sizes of the maps by the flags that would set them: those of an earlier agent
    /// are kept.
    pub fn sizes(&self) -> impl Iterator<Item = (&'static str, u32)> + '_ {
        self.sizes.iter().copied()
    }
}
