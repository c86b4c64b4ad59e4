//! The devices of this node's pods: `--local-delivery direct`, `--pod-services on`.

/// Flags of a [`PodDevice`].
pub mod pod_flags {
    /// Packets of established flows, and replies, may bypass the stack.
    pub const DIRECT: u16 = 1;
    /// Packets of the pod to Services are translated here.
    pub const SERVICES: u16 = 2;
}

/// The host side of a pod's device, where `tp_tc_pod` or `tp_pod_ingress` is attached: the value of
/// `tp_pod_devices`, by the device's index.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PodDevice {
    /// The largest IP packet, in bytes.
    pub mtu: u32,
    /// The bridge that the device is a port of; 0 if it is none.
    pub bridge: u32,
    /// The MAC address of that bridge; zero without one.
    pub bridge_mac: [u8; 6],
    /// See [`pod_flags`].
    pub flags: u16,
}
