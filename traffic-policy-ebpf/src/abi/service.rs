//! Names of Service ports, and their counters.

/// The bytes of a namespace, a name or a port's name, zero filled. Kubernetes allows 63 (RFC 1123
/// labels).
pub const NAME_LENGTH: usize = 64;

/// The index that stands for "no Service".
pub const NO_SERVICE: u32 = u32::MAX;

/// Policies of a Service, as its own fields and annotations name them.
pub mod policy {
    pub const EXTERNAL_LOCAL: u8 = 1;
    pub const INTERNAL_LOCAL: u8 = 2;
    /// Endpoints are to be chosen by a Maglev table; a frontend's flags tell whether it has one.
    pub const MAGLEV: u8 = 4;
}

/// The name of the Service port that has an index. The agent writes it for display; the packet path
/// does not read it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceInfo {
    pub namespace: [u8; NAME_LENGTH],
    pub name: [u8; NAME_LENGTH],
    pub port: [u8; NAME_LENGTH],
    /// The IP protocol number.
    pub protocol: u8,
    pub ipv6: u8,
    /// See [`policy`].
    pub policies: u8,
    pub zero: u8,
}

/// The key of `tp_svc_counts`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct ServiceCountKey {
    pub service: u32,
    /// The number of the [`Outcome`][crate::outcome::Outcome].
    pub outcome: u32,
}

/// The packets of a Service port by outcome: refusals are added as they happen, packets of a flow
/// when the flow ends. Existing flows hold their own counts.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ServiceCount {
    pub packets: u64,
    /// Bytes of IP packets.
    pub bytes: u64,
    /// Flows that ended.
    pub flows: u64,
}
