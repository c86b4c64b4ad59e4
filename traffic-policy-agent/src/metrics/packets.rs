//! Metrics of packets by outcome: for each hook, and for each Service.

use std::collections::BTreeMap;

use traffic_policy_cluster::model::ServicePortKey;
use traffic_policy_dataplane::{Counter, inspect::ServiceCount};
use traffic_policy_ebpf::outcome::Outcome;

use super::{exposition::Family, labels::port_labels};

/// Returns the packets by hook and outcome.
pub fn by_hook(counters: &[Counter]) -> Family {
    let mut family = Family::counter(
        "traffic_policy_packets_total",
        "Packets that left the packet path at a hook with an outcome, since the maps were made.",
    );
    for (hook, outcome, packets) in counters {
        family.add(&[("hook", hook), ("outcome", outcome.name())], *packets as f64);
    }
    family
}

/// Returns packets and bytes by Service port and outcome. Several counts of one port and outcome
/// are summed.
pub fn by_service(counts: &[ServiceCount]) -> Vec<Family> {
    let mut sums: BTreeMap<(&ServicePortKey, Outcome), (u64, u64)> = BTreeMap::new();
    for count in counts {
        let (packets, bytes) = sums.entry((&count.key, count.outcome)).or_default();
        *packets += count.packets;
        *bytes += count.bytes;
    }
    let mut packets = Family::counter(
        "traffic_policy_service_packets_total",
        "Packets of a Service port by outcome; refused are rejected-*, reset-* and dropped-*.",
    );
    let mut bytes = Family::counter(
        "traffic_policy_service_bytes_total",
        "Bytes of the IP packets of a Service port by outcome.",
    );
    for ((key, outcome), (packet_sum, byte_sum)) in sums {
        let labels = [&port_labels(key)[..], &[("outcome", outcome.name())]].concat();
        packets.add(&labels, packet_sum as f64);
        bytes.add(&labels, byte_sum as f64);
    }
    vec![packets, bytes]
}

#[cfg(test)]
mod tests {
    use traffic_policy_cluster::model::{Protocol, ServiceName};

    use super::*;

    fn count(name: &str, ipv6: bool, outcome: Outcome, packets: u64) -> ServiceCount {
        let service = ServiceName { namespace: "shop".to_owned(), name: name.to_owned() };
        let key = ServicePortKey { service, port: "http".to_owned(), protocol: Protocol::Tcp, ipv6 };
        ServiceCount { key, outcome, packets, bytes: packets * 100 }
    }

    #[test]
    fn every_count_of_a_service_is_one_series() {
        let counts = [
            count("web", true, Outcome::DroppedSourceRange, 7),
            count("web", false, Outcome::Forwarded, 1),
            count("api", false, Outcome::RejectedNoEndpoint, 0),
            // The count may be that of another hook.
            count("web", false, Outcome::Forwarded, 2),
        ];
        let series = |name: &str, ipv6: &str, outcome: &str, value: u64| {
            format!(
                "{{namespace=\"shop\",service=\"{name}\",port=\"http\",protocol=\"TCP\",ip_family=\"{ipv6}\",\
                 outcome=\"{outcome}\"}} {value}"
            )
        };
        let [packets, bytes] = &by_service(&counts)[..] else { panic!("two families") };
        let rows = |family: &Family| -> Vec<String> {
            family.to_string().lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect()
        };
        let expected = |name: &str, factor: u64| {
            [
                ("api", "IPv4", "rejected-no-endpoint", 0),
                ("web", "IPv4", "forwarded", 3),
                ("web", "IPv6", "dropped-source-range", 7),
            ]
            .map(|(service, ipv6, outcome, value)| {
                format!("{name}{}", series(service, ipv6, outcome, value * factor))
            })
        };
        assert_eq!(rows(packets), expected("traffic_policy_service_packets_total", 1));
        assert_eq!(rows(bytes), expected("traffic_policy_service_bytes_total", 100));
    }

    #[test]
    fn packets_by_hook() {
        let family = by_hook(&[("xdp", Outcome::Forwarded, 5), ("egress", Outcome::Passed, 0)]).to_string();
        assert!(family.contains("\ntraffic_policy_packets_total{hook=\"xdp\",outcome=\"forwarded\"} 5\n"));
        assert!(family.contains("\ntraffic_policy_packets_total{hook=\"egress\",outcome=\"passed\"} 0\n"));
    }
}
