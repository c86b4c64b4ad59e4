//! Ways to other nodes in words, for the log and `status`.

use std::fmt;

use traffic_policy_cluster::model::{Passing, Way};

/// The most nodes that a line of the log names.
const NAMED: usize = 5;

/// Logs a way to these nodes that was not known, or was another one.
pub(super) fn report(way: Way, ipv6: bool, nodes: &[&str]) {
    let more = nodes.len().saturating_sub(NAMED);
    let mut names = nodes[..nodes.len() - more].join(", ");
    if more > 0 {
        names = format!("{names} and {more} more");
    }
    let family = family(ipv6);
    if way.is_open() {
        tracing::info!("{family} that is forwarded directly gets to {names}: {}", InWords(way));
    } else {
        tracing::warn!(
            "not all {family} that is forwarded directly gets to {names}: {} (`check --direct` with a node's name looks closer)",
            InWords(way)
        );
    }
}

/// Returns the name of an address family.
pub(super) const fn family(ipv6: bool) -> &'static str {
    if ipv6 { "IPv6" } else { "IPv4" }
}

/// A way, for the log and `status`.
pub(super) struct InWords(pub(super) Way);

impl fmt::Display for InWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = |passing: Passing| match (passing.within_ip, passing.within_udp) {
            (true, true) => "within IP and UDP",
            (true, false) => "within IP, not UDP",
            (false, true) => "within UDP, not IP",
            (false, false) => "not at all",
        };
        let Way { direct, tunnel, by_mac } = self.0;
        if by_mac {
            f.write_str("by MAC address, and ")?;
        }
        if direct == tunnel {
            return write!(f, "{}", of(direct));
        }
        write!(f, "{}, and with replies through this node {}", of(direct), of(tunnel))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_has_words() {
        let [ip, udp] =
            [(true, false), (false, true)].map(|(within_ip, within_udp)| Passing { within_ip, within_udp });
        for (direct, tunnel, words) in [
            (Passing::ALL, Passing::ALL, "within IP and UDP"),
            (udp, udp, "within UDP, not IP"),
            (Passing::NONE, Passing::ALL, "not at all, and with replies through this node within IP and UDP"),
            (ip, Passing::NONE, "within IP, not UDP, and with replies through this node not at all"),
        ] {
            assert_eq!(InWords(Way { direct, tunnel, by_mac: false }).to_string(), words);
        }
        let by_mac = Way { by_mac: true, ..Way::OPEN };
        assert_eq!(InWords(by_mac).to_string(), "by MAC address, and within IP and UDP");
    }
}
