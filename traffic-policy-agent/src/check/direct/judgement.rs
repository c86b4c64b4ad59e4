//! The judgement on another node's answers: what to set, and what the network lets not pass.

use std::fmt;

use traffic_policy_dataplane::node::Answered;

use super::{
    super::Finding,
    peer::{ByMac, Facts, Length},
};

/// IPv6's least MTU (RFC 8200 section 5) and an outer IP header, in bytes.
const LEAST_IPV6: u32 = 1280 + 40;

impl Facts {
    fn protocol(&self) -> u8 {
        if self.endpoint.is_ipv4() { 4 } else { 41 }
    }

    /// The bytes of an outer packet's headers within IP, and within UDP.
    fn outer(&self) -> [u32; 2] {
        if self.endpoint.is_ipv4() { [20, 28] } else { [40, 48] }
    }
}

/// Returns the findings about a node of this name.
pub(super) fn of(peer: &str, facts: &Facts) -> Vec<Finding> {
    let mut findings = vec![judge_plain(peer, facts)];
    findings.extend(facts.length.map(|length| judge_length(peer, facts, length)));
    if facts.plain != [Answered::No; 2] || facts.back.contains(&Answered::Within) {
        findings.push(judge_back(peer, facts));
    }
    findings.push(judge_by_mac(peer, facts));
    findings
}

fn judge_plain(peer: &str, facts: &Facts) -> Finding {
    let (endpoint, protocol) = (facts.endpoint, facts.protocol());
    match facts.plain.map(|answered| answered != Answered::No) {
        [true, true] => Finding::ok(
            "direct-peer",
            format!(
                "{peer} ({endpoint}) answers packets within protocol {protocol} and within UDP, with a frontend's address as source"
            ),
        ),
        [true, false] => Finding::note(
            "direct-peer",
            format!(
                "{peer} ({endpoint}) answers packets within protocol {protocol}, and none within UDP: the network does not let UDP port 6080 pass, or its agent is an older one"
            ),
            "--dispatch ipip",
        ),
        [false, true] => Finding::warning(
            "direct-peer",
            format!(
                "{peer} ({endpoint}) answers packets within UDP, and none within protocol {protocol}, which the network does not let pass"
            ),
            "--dispatch udp, on all nodes",
        ),
        [false, false] => match facts.back.map(|answered| answered == Answered::Within) {
            [false, false] => Finding::warning(
                "direct-peer",
                format!("{peer} ({endpoint}) answers no packet that is forwarded to it directly"),
                "see that the network lets pass protocol 4 and 41, or UDP port 6080, between nodes and pods of others, and packets with a source that is not the sender's own (docs/direct.md); that this node's Lease is known there, for ten seconds; else --forwarding snat",
            ),
            [ipip, _] => Finding::warning(
                "direct-peer",
                format!(
                    "{peer} ({endpoint}) opens packets, but no answer with a frontend's address as source arrives: the network lets no node send from an address that is not its own"
                ),
                if ipip {
                    "--forwarding tunnel, on all nodes"
                } else {
                    "--forwarding tunnel --dispatch udp, on all nodes"
                },
            ),
        },
    }
}

fn judge_length(peer: &str, facts: &Facts, length: Length) -> Finding {
    const PROBE: &str = "direct-mtu";
    let Facts { endpoint, device, mtu, of_route, .. } = facts;
    let whose = if *of_route { "that its route names" } else { "that of the device" };
    let fits = |mtu: u32| {
        let [ipip, udp] = facts.outer().map(|outer| mtu.saturating_sub(outer));
        format!("packets of up to {ipip} bytes fit within IP, of up to {udp} within UDP")
    };
    match length {
        Length::Fits if !endpoint.is_ipv4() && *mtu < LEAST_IPV6 => Finding::note(
            PROBE,
            format!(
                "the MTU towards {peer} ({endpoint}) by {device} is {mtu}, {whose}: IPv6 is not forwarded directly there, because what remains is less than 1280"
            ),
            format!("an MTU of {LEAST_IPV6} or more, or nothing: such packets use snat"),
        ),
        Length::Fits => Finding::ok(
            PROBE,
            format!(
                "the MTU towards {peer} ({endpoint}) by {device} is {mtu}, {whose}, and a packet of that length is answered: {}",
                fits(*mtu)
            ),
        ),
        Length::Only(length) => Finding::warning(
            PROBE,
            format!(
                "a packet of {mtu} bytes to {peer} ({endpoint}) is lost, although the MTU by {device} is {mtu}, {whose}; one of {length} is answered: {}",
                fits(length)
            ),
            format!(
                "a route to the pods there with mtu {length} on every node (ip route change … mtu {length}), or the MTU of the devices between the nodes: clients are told what fits only if the route says it"
            ),
        ),
        Length::Unknown => Finding::warning(
            PROBE,
            format!(
                "a packet of {mtu} bytes to {peer} ({endpoint}) is lost, although the MTU by {device} is {mtu}, {whose}, and so is one of 1280"
            ),
            "an MTU between the nodes of more than 1280, or --forwarding snat",
        ),
    }
}

/// The outer packets within which something arrives, as a list in words.
struct Named<'a>(&'a Facts, [bool; 2]);

impl fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.1 {
            [true, true] => write!(f, "protocol {} and within UDP", self.0.protocol()),
            [true, false] => write!(f, "protocol {}", self.0.protocol()),
            [false, _] => write!(f, "UDP"),
        }
    }
}

fn judge_back(peer: &str, facts: &Facts) -> Finding {
    const PROBE: &str = "direct-tunnel";
    let endpoint = facts.endpoint;
    let found = |text: String, fix: &str| {
        if facts.uses_tunnel { Finding::warning(PROBE, text, fix) } else { Finding::note(PROBE, text, fix) }
    };
    let arrived = facts.back.map(|answered| answered == Answered::Within);
    if facts.back.contains(&Answered::AsItIs) {
        return found(
            format!(
                "{peer} ({endpoint}) answers the client itself, also where its replies are asked to come back through this node: its agent is an older one, and with --forwarding tunnel its endpoints get packets by snat"
            ),
            "the same version of the agent on all nodes",
        );
    }
    match arrived {
        [true, true] => Finding::ok(
            PROBE,
            format!(
                "replies of {peer} ({endpoint}) come back to this node within {}: --forwarding tunnel can be used",
                Named(facts, arrived)
            ),
        ),
        [false, false] => found(
            format!(
                "no reply of {peer} ({endpoint}) comes back to this node within another packet: with --forwarding tunnel, its endpoints would not be heard"
            ),
            "see that the network lets pass protocol 4 and 41, or UDP port 6080, also from nodes to addresses of nodes (docs/direct.md); else --forwarding direct or snat",
        ),
        _ => {
            let dispatch = if arrived[0] { "--dispatch ipip" } else { "--dispatch udp" };
            let lost = Named(facts, arrived.map(|arrived| !arrived));
            found(
                format!(
                    "replies of {peer} ({endpoint}) come back to this node within {}, and not within {lost}",
                    Named(facts, arrived)
                ),
                &format!("with --forwarding tunnel: {dispatch}, on all nodes"),
            )
        }
    }
}

fn judge_by_mac(peer: &str, facts: &Facts) -> Finding {
    const PROBE: &str = "direct-l2";
    let endpoint = facts.endpoint;
    match &facts.by_mac {
        ByMac::Answered => Finding::ok(
            PROBE,
            format!(
                "{peer} ({endpoint}) is on the same segment, and answers packets that are sent to its MAC address as they are: --dispatch l2 can be used"
            ),
        ),
        ByMac::Lost => {
            let text = format!(
                "{peer} ({endpoint}) is the next hop, by its MAC address, but answers no packet that is sent there as it is: something between, such as the host of a virtual machine, looks at the destination address"
            );
            if facts.uses_mac {
                Finding::warning(PROBE, text, "--dispatch auto, or udp: what goes there now is lost")
            } else {
                Finding::note(PROBE, text, "leave --dispatch l2 alone")
            }
        }
        ByMac::NoEthernet => named(
            facts,
            format!(
                "{peer} ({endpoint}) is reached by {}, which has no MAC addresses: an overlay",
                facts.device
            ),
        ),
        ByMac::NoNeighbour(hop) => named(
            facts,
            format!("the next hop to {peer} ({endpoint}), {hop}, has no MAC address: it does not answer"),
        ),
        ByMac::Router(hop) => named(
            facts,
            format!(
                "the next hop to {peer} ({endpoint}), {hop}, has a MAC address that no node's Lease names: a router, or an overlay"
            ),
        ),
        ByMac::OtherSettings(hop) => named(
            facts,
            format!(
                "the next hop to {peer} ({endpoint}), {hop}, is a node that may find another endpoint than this one: --forwarding, --algorithm or --maglev-size differ, or it does not take such packets"
            ),
        ),
    }
}

/// Returns the finding where nothing can be sent to a MAC address: with `l2`, such packets travel
/// within outer ones that name the endpoint.
fn named(facts: &Facts, why: String) -> Finding {
    let fix = if facts.uses_mac {
        "nothing: its packets travel within IP or UDP, as with --dispatch auto"
    } else {
        "nothing: with --dispatch l2, its packets travel within IP or UDP as with auto"
    };
    Finding::note("direct-l2", why, fix)
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use crate::check::Severity;

    const YES: Answered = Answered::AsItIs;
    const BACK: Answered = Answered::Within;
    const NO: Answered = Answered::No;

    fn facts() -> Facts {
        Facts {
            endpoint: [10, 0, 2, 3].into(),
            device: "eth0".to_owned(),
            mtu: 1500,
            of_route: false,
            plain: [YES; 2],
            back: [BACK; 2],
            length: Some(Length::Fits),
            by_mac: ByMac::Answered,
            uses_mac: false,
            uses_tunnel: false,
        }
    }

    #[track_caller]
    fn says(facts: &Facts, probe: &str, severity: Severity, found: &str, fix: Option<&str>) {
        let findings = of("node-2", facts);
        let finding = findings.iter().find(|finding| finding.probe == probe).unwrap();
        assert_eq!(
            (finding.severity, finding.fix.as_deref().map(|text| text.contains(fix.unwrap_or("?")))),
            (severity, fix.map(|_| true)),
            "{finding:?}"
        );
        assert!(finding.found.contains(found), "{finding:?}");
    }

    #[test]
    fn answers_tell_what_the_network_lets_pass() {
        let with = |plain, back| Facts { plain, back, length: None, ..facts() };
        for (plain, back, severity, fix) in [
            ([YES, YES], [BACK, BACK], Severity::Ok, None),
            ([YES, NO], [BACK, NO], Severity::Note, Some("--dispatch ipip")),
            ([NO, YES], [NO, BACK], Severity::Warning, Some("--dispatch udp, on all nodes")),
            ([NO, NO], [BACK, BACK], Severity::Warning, Some("--forwarding tunnel, on all nodes")),
            ([NO, NO], [NO, BACK], Severity::Warning, Some("--forwarding tunnel --dispatch udp")),
            ([NO, NO], [NO, NO], Severity::Warning, Some("--forwarding snat")),
        ] {
            says(&with(plain, back), "direct-peer", severity, "node-2 (10.0.2.3)", fix);
        }
        let none = of("node-2", &with([NO; 2], [NO; 2]));
        assert!(
            none.iter().all(|finding| finding.probe != "direct-tunnel"),
            "nothing is known of it: {none:?}"
        );
    }

    /// A probe that fails is a warning if the flag that needs it is in use, else a note.
    #[test]
    fn replies_that_do_not_come_back() {
        for (uses_tunnel, severity) in [(false, Severity::Note), (true, Severity::Warning)] {
            let with = |back| Facts { back, uses_tunnel, ..facts() };
            says(&with([BACK; 2]), "direct-tunnel", Severity::Ok, "within protocol 4 and within UDP", None);
            says(
                &with([NO, BACK]),
                "direct-tunnel",
                severity,
                "within UDP, and not within protocol 4",
                Some("--dispatch udp"),
            );
            says(
                &with([BACK, NO]),
                "direct-tunnel",
                severity,
                "within protocol 4, and not within UDP",
                Some("--dispatch ipip"),
            );
            says(
                &with([NO; 2]),
                "direct-tunnel",
                severity,
                "would not be heard",
                Some("--forwarding direct"),
            );
            says(
                &with([YES; 2]),
                "direct-tunnel",
                severity,
                "its agent is an older one",
                Some("the same version"),
            );
        }
    }

    #[test]
    fn what_fits_is_that_of_the_route() {
        let with = |mtu, of_route, length| Facts { mtu, of_route, length: Some(length), ..facts() };
        let mtu = "direct-mtu";
        says(
            &with(1500, false, Length::Fits),
            mtu,
            Severity::Ok,
            "1480 bytes fit within IP, of up to 1472 within UDP",
            None,
        );
        says(&with(1400, true, Length::Fits), mtu, Severity::Ok, "is 1400, that its route names", None);
        says(
            &with(1500, false, Length::Only(1450)),
            mtu,
            Severity::Warning,
            "of up to 1430 bytes fit",
            Some("mtu 1450"),
        );
        says(
            &with(1500, false, Length::Unknown),
            mtu,
            Severity::Warning,
            "and so is one of 1280",
            Some("snat"),
        );
        let six = Facts { endpoint: "fd00::3".parse().unwrap(), ..with(1319, true, Length::Fits) };
        says(&six, mtu, Severity::Note, "IPv6 is not forwarded directly", Some("1320"));
        says(&Facts { mtu: 1320, ..six }, mtu, Severity::Ok, "1280 bytes fit within IP", None);
    }

    #[test]
    fn one_segment_and_what_is_none() {
        let hop = IpAddr::from([192, 0, 2, 1]);
        for (by_mac, found) in [
            (ByMac::NoEthernet, "an overlay"),
            (ByMac::NoNeighbour(hop), "has no MAC address"),
            (ByMac::Router(hop), "192.0.2.1, has a MAC address that no node's Lease names"),
            (ByMac::OtherSettings(hop), "--maglev-size differ"),
        ] {
            says(&Facts { by_mac, ..facts() }, "direct-l2", Severity::Note, found, Some("within IP or UDP"));
        }
        says(&facts(), "direct-l2", Severity::Ok, "on the same segment", None);
        let lost = Facts { by_mac: ByMac::Lost, ..facts() };
        says(
            &lost,
            "direct-l2",
            Severity::Note,
            "the host of a virtual machine",
            Some("--dispatch l2 alone"),
        );
        says(
            &Facts { uses_mac: true, ..lost },
            "direct-l2",
            Severity::Warning,
            "is the next hop",
            Some("--dispatch auto"),
        );
    }
}
