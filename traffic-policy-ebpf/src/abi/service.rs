//! Names of Service ports, and what was counted for each.

/// Bytes of a namespace, a name or a port's name, zero filled. Kubernetes allows 63 (RFC 1123
/// labels).
pub const NAME_LENGTH: usize = 64;

/// The index that stands for "no Service".
pub const NO_SERVICE: u32 = u32::MAX;

/// Policies of a Service, as it says itself.
pub mod policy {
    pub const EXTERNAL_LOCAL: u8 = 1;
    pub const INTERNAL_LOCAL: u8 = 2;
}

/// Name of the Service port that has an index. Written by the agent for display; the packet path
/// does not read it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceInfo {
    pub namespace: [u8; NAME_LENGTH],
    pub name: [u8; NAME_LENGTH],
    pub port: [u8; NAME_LENGTH],
    /// IP protocol number.
    pub protocol: u8,
    pub ipv6: u8,
    /// See [`policy`].
    pub policies: u8,
    pub zero: u8,
}

/// Key of `tp_svc_counts`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct ServiceCountKey {
    pub service: u32,
    /// Number of the [`Outcome`][crate::outcome::Outcome].
    pub outcome: u32,
}

/// Packets of a Service port by outcome: refusals as they happen, those of flows when the flow
/// ends. Flows that still stand count for themselves.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ServiceCount {
    pub packets: u64,
    /// Bytes of IP packets.
    pub bytes: u64,
    /// Flows that ended.
    pub flows: u64,
}
