//! The devices of this node's pods: `--local-delivery direct`.

/// The host side of a pod's device, where `tp_tc_pod` is attached: the value of `tp_pod_devices`,
/// by the device's index.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PodDevice {
    /// The largest IP packet, in bytes.
    pub mtu: u32,
    /// The bridge that the device is a port of; 0 if it is none.
    pub bridge: u32,
}
