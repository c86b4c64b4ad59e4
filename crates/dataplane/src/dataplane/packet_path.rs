//! The packet path as the run loop sees it: all roles together. A test of the loop implements them
//! without a kernel.

use std::future::{Future, pending};

use super::{
    Dataplane, adoption::ConnectionAdoption, devices::DevicePrograms, gc::sweeps::FlowSweeps,
    nexthop::NextHops, node::NodeDescription, replacement::Replacement, service_maps::ServiceMaps,
    sockets::CgroupPrograms, sync::snat_ports::SnatPorts, usage::Figures,
};

/// The suspicion that a node is dead: connections to its endpoints are not answered, and nothing
/// else comes from any of them.
pub trait NodeSilence {
    /// Waits for the next suspicion, and returns the node's name. Cancel-safe. It never returns if
    /// nothing is suspected.
    fn suspected(&mut self) -> impl Future<Output = String> + Send;

    /// Sets whether a node is dead: new flows go to none of its endpoints.
    fn set_dead(&mut self, node: &str, dead: bool);
}

impl NodeSilence for Dataplane {
    async fn suspected(&mut self) -> String {
        // The programs do not notice unanswered connections.
        pending().await
    }

    fn set_dead(&mut self, _: &str, _: bool) {}
}

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
    + Replacement
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
        + Replacement
        + ServiceMaps
        + SnatPorts
{
}
