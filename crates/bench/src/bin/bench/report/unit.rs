//! Units of figures.

use serde::{Deserialize, Serialize};

/// Unit of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Unit {
    /// Nanoseconds per packet.
    Nanoseconds,
    /// Millions of packets per second that arrived.
    Mpps,
    Microseconds,
    Milliseconds,
    PerSecond,
    /// Percent of one CPU.
    Percent,
    Megabytes,
    Bytes,
    Packets,
    /// Number of connections or requests.
    Count,
    /// Instructions per packet.
    Instructions,
}

impl Unit {
    pub(crate) fn symbol(self) -> &'static str {
        match self {
            Self::Nanoseconds => "ns",
            Self::Mpps => "Mpps",
            Self::Microseconds => "µs",
            Self::Milliseconds => "ms",
            Self::PerSecond => "/s",
            Self::Percent => "%",
            Self::Megabytes => "MB",
            Self::Bytes => "B",
            Self::Packets => "packets",
            Self::Count => "",
            Self::Instructions => "instr",
        }
    }
}
