//! Outcomes: every way in which a packet can leave the program.

macro_rules! outcomes {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $text:literal, $verdict:ident;)+) => {
        /// Every way in which a packet can leave the program. Numbers are never reused: they index
        /// pinned counters.
        #[must_use]
        #[repr(u32)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Outcome { $($(#[$doc])* $name = $number,)+ }

        impl Outcome {
            pub const ALL: &[Self] = &[$(Self::$name,)+];

            /// The name used by metrics, tables and events.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)+ }
            }

            /// Returns the outcome with this number.
            #[inline(always)]
            pub const fn numbered(number: u32) -> Option<Self> {
                match number { $($number => Some(Self::$name),)+ _ => None }
            }

            /// Returns the verdict for the kernel.
            #[inline(always)]
            pub const fn verdict(self) -> Verdict {
                match self { $(Self::$name => Verdict::$verdict,)+ }
            }
        }
    };
}

/// The verdict on a packet for the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Hands it to the stack.
    Pass,
    Drop,
    /// Sends it: back out of the device it came by, or redirected.
    Send,
}

/// The number of counters of one hook; all outcomes are below it.
pub const OUTCOMES: u32 = 64;

outcomes! {
    /// The packet was sent to an endpoint on another node, source rewritten.
    Forwarded = 0, "forwarded", Send;
    /// A reply from another node, sent to the client.
    Replied = 1, "replied", Send;
    /// Handed to the stack for an endpoint on this node; the client's address is kept.
    Delivered = 2, "delivered", Pass;
    /// A reply of an endpoint on this node, source rewritten at egress.
    RepliedLocal = 3, "replied-local", Pass;
    /// An ICMP error about a packet of a reply, forwarded to the endpoint on another node that sent
    /// the packet.
    ForwardedIcmpError = 4, "forwarded-icmp-error", Send;
    /// An ICMP error about a request to an endpoint on another node, forwarded to the client.
    RepliedIcmpError = 5, "replied-icmp-error", Send;
    /// An ICMP error about a packet of a reply, handed to the stack for the endpoint on this node
    /// that sent the packet.
    DeliveredIcmpError = 6, "delivered-icmp-error", Pass;
    /// An ICMP error of this node or one of its endpoints about a request, rewritten at egress.
    RepliedLocalIcmpError = 7, "replied-local-icmp-error", Pass;

    /// The packet was sent unchanged, within an outer packet, to the node of its endpoint.
    ForwardedDirect = 13, "forwarded-direct", Send;
    /// Another node has sent a segment of a connection that this node does not know: it was sent
    /// on, within an outer packet, to the node of an endpoint that the Maglev table names, or named
    /// before.
    ForwardedToOwner = 27, "forwarded-to-owner", Send;

    /// Sent straight into the pod of this node that is its endpoint, bypassing the stack:
    /// `--local-delivery direct`.
    DeliveredDirect = 14, "delivered-direct", Send;
    /// A reply of an endpoint on this node, source rewritten where it left the pod, and sent to the
    /// client, bypassing the stack: `--local-delivery direct`.
    RepliedDirect = 15, "replied-direct", Send;

    /// A reply of an endpoint on this node, source rewritten at egress, and sent within an outer
    /// packet to the node in front.
    RepliedToFront = 50, "replied-to-front", Send;
    /// A reply that another node has sent within an outer packet: opened, and sent to the client.
    RepliedOpened = 51, "replied-opened", Send;

    /// No endpoint on any node: port unreachable was sent to the client.
    RejectedNoEndpoint = 8, "rejected-no-endpoint", Send;
    /// The packet's time to live expired here: time exceeded was sent.
    RejectedTtlExceeded = 9, "rejected-ttl-exceeded", Send;
    /// The packet is longer than the MTU of the route, and must not be fragmented: fragmentation
    /// needed (packet too big) was sent.
    RejectedMtuExceeded = 10, "rejected-mtu-exceeded", Send;
    /// A segment without a flow to an address that is not this node's, or one that another node has
    /// sent although this one forwards its connection by SNAT: RST was sent.
    ResetNoFlow = 11, "reset-no-flow", Send;

    /// The destination is a ClusterIP, but none of its ports: port unreachable was sent.
    RejectedUnknownPort = 12, "rejected-unknown-port", Send;

    /// The policy is Local and this node has no endpoint.
    DroppedNoLocalEndpoint = 16, "dropped-no-local-endpoint", Drop;
    /// No free source port towards this endpoint.
    DroppedNoSnatPort = 17, "dropped-no-snat-port", Drop;
    /// The flow table is full.
    DroppedTableFull = 18, "dropped-table-full", Drop;
    /// No route to the endpoint or client.
    DroppedNoRoute = 19, "dropped-no-route", Drop;
    /// `net.ipv4.ip_forward` (or its IPv6 twin) is off for the device.
    DroppedForwardingDisabled = 20, "dropped-forwarding-disabled", Drop;
    /// The packet is longer than the MTU of the route, may be fragmented, but cannot be sent in two
    /// pieces.
    DroppedMtuExceeded = 21, "dropped-mtu-exceeded", Drop;
    /// An answer of the program was due, but the rate limit was reached.
    DroppedRateLimited = 22, "dropped-rate-limited", Drop;
    /// The kernel refused a change after the first write, or an answer could not be built.
    DroppedInternalError = 23, "dropped-internal-error", Drop;
    /// The source is in none of the Service's `loadBalancerSourceRanges`.
    DroppedSourceRange = 24, "dropped-source-range", Drop;
    /// The time to live of a packet for which no error may be sent expired here: an ICMP error, or
    /// a later fragment (RFC 1122 section 3.2.2).
    DroppedTtlExceeded = 28, "dropped-ttl-exceeded", Drop;

    /// The source of a new flow is one that no packet from outside can have: this node's own or a
    /// frontend's, reserved, or (`--source-check strict`) one to which no route leads by the device
    /// that the packet came by.
    DroppedMartianSource = 29, "dropped-martian-source", Drop;
    /// The endpoint is on another node, behind a device to which no program is attached.
    DroppedUnattachedDevice = 30, "dropped-unattached-device", Drop;

    /// Another node has sent the packet for an endpoint that this node does not have for that
    /// Service, or that does not take it.
    DroppedUnknownEndpoint = 31, "dropped-unknown-endpoint", Drop;
    /// A segment amid a connection that this node does not know. The stack of the endpoint's pod
    /// has one with its addresses and ports, whose numbers the segment's do not fit; or this node
    /// forwards such a one by SNAT, and another one has sent the segment.
    DroppedOutOfWindow = 52, "dropped-out-of-window", Drop;

    /// The first fragment of an SCTP packet whose ports had to be changed: its checksum cannot be
    /// updated.
    DroppedSctpFragment = 26, "dropped-sctp-fragment", Drop;
    /// The destination is an address of the cluster's range of ClusterIPs that belongs to no
    /// Service.
    DroppedUnallocatedClusterIp = 25, "dropped-unallocated-cluster-ip", Drop;

    /// Not a Service packet, by the prefilter.
    Passed = 32, "passed", Pass;
    /// Neither IPv4 nor IPv6 (this includes VLAN-tagged frames: they belong to the VLAN's own
    /// device).
    PassedNotIp = 33, "passed-not-ip", Pass;
    /// The packet is shorter than its headers claim, or a header is invalid.
    PassedMalformed = 34, "passed-malformed", Pass;
    /// Neither TCP, UDP nor SCTP.
    PassedUnsupportedProtocol = 35, "passed-unsupported-protocol", Pass;
    /// A fragment without ports whose first fragment, with the ports, has not arrived or was not a
    /// Service packet.
    PassedFragment = 36, "passed-fragment", Pass;
    /// IPv6 extension headers before the transport header that cannot be skipped, or an IPv4 source
    /// route.
    PassedUnsupportedHeader = 37, "passed-unsupported-header", Pass;
    /// A bit of the prefilter was set, but there is neither a flow nor a frontend.
    PassedNotService = 38, "passed-not-service", Pass;
    /// A segment without a flow to an address of this node: it belongs to the stack, or to a
    /// connection of an earlier proxy.
    PassedNoFlow = 39, "passed-no-flow", Pass;
    /// XDP cannot finish it (next hop not resolved, device cannot take frames from XDP, too long,
    /// in several buffers, flow marked for TC): TC does.
    PassedToTc = 40, "passed-to-tc", Pass;
    /// XDP has delivered it already.
    PassedDelivered = 41, "passed-delivered", Pass;
    /// A flow of the other direction, or an entry whose other entry has been removed.
    PassedStaleFlow = 42, "passed-stale-flow", Pass;
    /// The program that should have continued is not in place.
    PassedMissedTailCall = 43, "passed-missed-tail-call", Pass;
    /// A frame for another machine's MAC address, flooded by a switch: it is left to that machine.
    PassedOtherHost = 44, "passed-other-host", Pass;
    /// An answer to a datagram that this node, or a pod behind its masquerade, sent from a port
    /// that is also a Service's.
    PassedOwnAnswer = 46, "passed-own-answer", Pass;
    /// A segment of an endpoint whose numbers do not fit the flow, which has not begun or has
    /// ended: it belongs to another connection with the same addresses and ports.
    PassedOutOfWindow = 47, "passed-out-of-window", Pass;
    /// An ICMP error about a packet that belongs to no flow.
    PassedIcmpNoFlow = 48, "passed-icmp-no-flow", Pass;
    /// A packet of a connection that began under an earlier proxy, and was adopted: conntrack
    /// translates it.
    PassedToConntrack = 49, "passed-to-conntrack", Pass;

    /// A socket of this node or its pods: its destination was translated to an endpoint before any
    /// packet was built.
    Connected = 56, "connected", Pass;
    /// A reply of an endpoint on this node, or an ICMP error about one: sent by the device to which
    /// routing leads packets of its new source, not by the one to which the endpoint's address led
    /// it.
    RepliedRedirected = 57, "replied-redirected", Send;
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn numbers_and_names_are_distinct() {
        let numbers: BTreeSet<u32> = Outcome::ALL.iter().map(|o| *o as u32).collect();
        let names: BTreeSet<&str> = Outcome::ALL.iter().map(|o| o.name()).collect();
        assert_eq!(numbers.len(), Outcome::ALL.len());
        assert_eq!(names.len(), Outcome::ALL.len());
        assert!(numbers.iter().all(|n| *n < OUTCOMES));
        for number in 0..2 * OUTCOMES {
            let found = Outcome::numbered(number);
            assert_eq!(found.map(|outcome| outcome as u32), numbers.contains(&number).then_some(number));
        }
    }

    #[test]
    fn names_say_the_verdict() {
        for outcome in Outcome::ALL {
            let expected = match outcome.name().split('-').next().unwrap() {
                "forwarded" | "rejected" | "reset" => Verdict::Send,
                "replied" if !outcome.name().contains("local") => Verdict::Send,
                "delivered" if outcome.name().contains("direct") => Verdict::Send,
                "dropped" => Verdict::Drop,
                _ => Verdict::Pass,
            };
            assert_eq!(outcome.verdict(), expected, "{}", outcome.name());
        }
    }
}
