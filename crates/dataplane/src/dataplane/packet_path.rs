//! The packet path as the run loop sees it: all roles together. A test of the loop implements them
//! without a kernel.

use super::{
    adoption::ConnectionAdoption, devices::DevicePrograms, nexthop::NextHops, node::NodeDescription,
    node_silence::NodeSilence, pod_devices::PodPrograms, replacement::Replacement, sctp_divider::SctpReplies,
    service_maps::ServiceMaps, sockets::CgroupPrograms, sweep::sweeps::FlowSweeps,
    sync::snat_ports::SnatPorts, usage::Figures,
};

/// All that the run loop does with the packet path.
pub trait PacketPath:
    CgroupPrograms
    + ConnectionAdoption
    + DevicePrograms
    + Figures
    + FlowSweeps
    + NextHops
    + NodeDescription
    + NodeSilence
    + PodPrograms
    + Replacement
    + SctpReplies
    + ServiceMaps
    + SnatPorts
{
}

impl<P> PacketPath for P where
    P: CgroupPrograms
        + ConnectionAdoption
        + DevicePrograms
        + Figures
        + FlowSweeps
        + NextHops
        + NodeDescription
        + NodeSilence
        + PodPrograms
        + Replacement
        + SctpReplies
        + ServiceMaps
        + SnatPorts
{
}
