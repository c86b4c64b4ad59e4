//! Labels and units that several metrics share.

use std::time::SystemTime;

use traffic_policy_cluster::model::ServicePortKey;

/// Returns the value of the label `ip_family`.
pub(super) const fn ip_family(ipv6: bool) -> &'static str {
    if ipv6 { "IPv6" } else { "IPv4" }
}

/// Returns the labels that name a Service port.
pub(super) fn port_labels(key: &ServicePortKey) -> [(&'static str, &str); 5] {
    [
        ("namespace", &key.service.namespace),
        ("service", &key.service.name),
        ("port", &key.port),
        ("protocol", key.protocol.name()),
        ("ip_family", ip_family(key.ipv6)),
    ]
}

/// Returns the seconds since 1970.
pub(super) fn unix(time: SystemTime) -> f64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
