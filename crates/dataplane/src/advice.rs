//! The reason and the remedy of each outcome, in sentences.
//!
//! Each is one or two sentences long, for the lines of `monitor` and the answers of `explain`.
//! Every outcome has its own: a new outcome does not compile without a text.

use std::net::IpAddr;

use traffic_policy_cluster::model::FrontendKind;
use traffic_policy_ebpf::outcome::Outcome;

/// The known facts about a packet other than its outcome. Sentences omit those that are `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Context<'a> {
    /// `namespace/name` of the Service.
    pub service: Option<&'a str>,
    /// The kind of the frontend's address, which decides which of the two traffic policies applied.
    pub frontend: Option<FrontendKind>,
    /// The source address of the packet.
    pub client: Option<IpAddr>,
    /// The device on which the packet arrived.
    pub device: Option<&'a str>,
    /// Whether a socket hook reported the outcome, for a call of a process rather than a packet.
    pub socket: bool,
}

impl Context<'_> {
    fn service(&self) -> String {
        self.service.map_or_else(|| "the Service".to_owned(), |name| format!("Service {name}"))
    }

    /// The namespace and name of the Service, for a command line.
    fn name(&self) -> (&str, &str) {
        self.service.and_then(|service| service.split_once('/')).unwrap_or(("NAMESPACE", "NAME"))
    }

    fn client(&self) -> String {
        self.client.map_or_else(|| "the client".to_owned(), |client| client.to_string())
    }

    fn device(&self) -> String {
        self.device.map_or_else(|| "the device it came by".to_owned(), str::to_owned)
    }

    /// The traffic policy that applies to this frontend.
    fn policy(&self) -> &'static str {
        match self.frontend {
            Some(FrontendKind::ClusterIp) => "internalTrafficPolicy",
            _ => "externalTrafficPolicy",
        }
    }
}

/// Returns the explanation of an outcome: the event and its reason.
#[must_use]
pub fn reason(outcome: Outcome, context: &Context<'_>) -> String {
    let (service, client) = (context.service(), context.client());
    match outcome {
        Outcome::Forwarded => "the endpoint is on another node, so the source became this node's address and the reply comes back here".to_owned(),
        Outcome::ForwardedToOwner => "another node has sent the packet, of a connection that this node does not know, to an endpoint here: it was sent on, within another packet, to an endpoint that the Maglev table names, or named before".to_owned(),
        Outcome::ForwardedDirect => "the endpoint is on another node, which gets the packet unchanged, within another one, and answers the client without this node".to_owned(),
        Outcome::Replied => "a reply of an endpoint on another node, sent on to the client from the address it had asked".to_owned(),
        Outcome::Delivered => "the endpoint is on this node and sees the client's own address".to_owned(),
        Outcome::RepliedLocal => "a reply of an endpoint on this node, sent from the address that the client had asked".to_owned(),
        Outcome::DeliveredDirect => "the endpoint is on this node, and the flow is established: the packet went straight into the pod, bypassing the stack and its rules (--local-delivery direct)".to_owned(),
        Outcome::RepliedDirect => "a reply of an endpoint on this node, sent from the address that the client had asked; the flow is established, so it went from its pod's device to the client, bypassing the stack and its rules (--local-delivery direct)".to_owned(),
        Outcome::RepliedToFront => "a reply of an endpoint on this node: it goes back to the node in front, within another packet, and from there to the client (--forwarding tunnel there)".to_owned(),
        Outcome::RepliedOpened => "a reply of an endpoint on another node, which came within another packet, and was sent to the client from the address that it had asked (--forwarding tunnel)".to_owned(),
        Outcome::RepliedRedirected => "a reply of an endpoint on this node, sent from the address that the client had asked; rules of routing lead packets with that address out by another device than those with the endpoint's, so it went there".to_owned(),
        Outcome::Connected => "the socket was connected to an endpoint directly: no packet carries the Service's address".to_owned(),
        Outcome::ForwardedIcmpError => "an ICMP error about a packet that this node sent on, translated for the endpoint's side, or about a reply of a direct flow, sent within a packet to the endpoint's node, which translates it".to_owned(),
        Outcome::RepliedIcmpError => "an ICMP error about a packet that this node sent on, also within another packet, translated for the client".to_owned(),
        Outcome::DeliveredIcmpError => "an ICMP error about a reply of an endpoint on this node, translated for the endpoint".to_owned(),
        Outcome::RepliedLocalIcmpError => "an ICMP error of an endpoint on this node, or about a packet to it, translated for the client".to_owned(),
        Outcome::RejectedNoEndpoint => {
            let told = if context.socket { "the call failed at once" } else { "the client was told `port unreachable`" };
            format!("{service} has no endpoint that takes connections on any node; {told} and need not wait")
        }
        Outcome::RejectedTtlExceeded => "its time to live ended at this node, as at any router; `time exceeded` was sent".to_owned(),
        Outcome::RejectedMtuExceeded => "it is longer than the way to the endpoint or client allows and may not be fragmented; the sender was told the size that fits".to_owned(),
        Outcome::ResetNoFlow => "a segment of a connection that this node does not know, or that another node has forwarded directly although the connection goes through this one by SNAT; the client was sent RST so that it connects anew".to_owned(),
        Outcome::RejectedUnknownPort if context.socket => {
            "the address is a ClusterIP, but its Service has no such port; the call failed at once".to_owned()
        }
        Outcome::RejectedUnknownPort => "the address is a ClusterIP, but its Service has no such port; `port unreachable` was sent".to_owned(),
        Outcome::DroppedNoLocalEndpoint if context.socket => format!(
            "{service} has {}: Local and no endpoint on this node; the call failed at once, for a packet would be dropped in silence",
            context.policy()
        ),
        Outcome::DroppedNoLocalEndpoint => format!(
            "{service} has {}: Local and no endpoint on this node; it is dropped in silence so that a load balancer tries another node",
            context.policy()
        ),
        Outcome::DroppedNoSnatPort => "every source port that was tried towards the endpoint belongs to another flow".to_owned(),
        Outcome::DroppedTableFull => "the flow table is full, and flows that stand are not evicted for new ones (but direct ones that pause); or, of a single SYN, another CPU was writing or removing its entry at that moment".to_owned(),
        Outcome::DroppedNoRoute => "this node has no route to the endpoint (or, of a reply, to the client)".to_owned(),
        Outcome::DroppedForwardingDisabled => format!("the kernel does not forward packets that come by {}", context.device()),
        Outcome::DroppedMtuExceeded => "it is longer than the way out allows, and would have to be cut into more than two pieces, or has IPv4 options".to_owned(),
        Outcome::DroppedSctpFragment => "it is the first fragment of an SCTP packet whose ports have to be changed, and the checksum that would follow from it covers bytes of the other fragments".to_owned(),
        Outcome::DroppedRateLimited => "an ICMP error or RST was due, but this CPU has sent as many as it may this second".to_owned(),
        Outcome::DroppedInternalError => "the kernel refused to change the packet, or an answer to it could not be built".to_owned(),
        Outcome::DroppedSourceRange => format!("{client} is in none of the loadBalancerSourceRanges of {service}"),
        Outcome::DroppedTtlExceeded => "its time to live ended at this node, and of an error or a later fragment no sender may be told".to_owned(),
        Outcome::DroppedMartianSource => format!("no packet from outside can have {client} as its source: it is this node's own or a frontend's, reserved, or its way back is not {}", context.device()),
        Outcome::DroppedUnattachedDevice => "the endpoint is on another node, and the route to it leaves by a device that no program is attached to: its replies would not come back translated".to_owned(),
        Outcome::DroppedUnallocatedClusterIp => "the address lies in the cluster's range of ClusterIPs, and no Service has it".to_owned(),
        Outcome::DroppedOutOfWindow => "there is a connection with these addresses and ports whose sequence numbers are others: in the pod, while this node does not know it, or through this node by SNAT, while another node has forwarded the segment directly".to_owned(),
        Outcome::DroppedUnknownEndpoint => "another node has sent it for an endpoint that is not here, or not for this Service".to_owned(),
        Outcome::Passed => "neither its port nor its address belongs to a Service: the node's own traffic".to_owned(),
        Outcome::PassedNotIp => "it is neither IPv4 nor IPv6, or carries a VLAN tag and belongs to the VLAN's own device".to_owned(),
        Outcome::PassedMalformed => "it is shorter than its headers say, or a header is not valid: the stack judges it".to_owned(),
        Outcome::PassedUnsupportedProtocol if context.socket => "the kernel shows programs of sockets the calls of TCP and UDP only: an SCTP socket's packets carry the Service's address".to_owned(),
        Outcome::PassedUnsupportedProtocol => "it is neither TCP, UDP nor SCTP, which are what Services are served by".to_owned(),
        Outcome::PassedFragment => "it is a later fragment whose first one, which has the ports, was not seen here before".to_owned(),
        Outcome::PassedUnsupportedHeader => "it has IPv6 extension headers that end in nothing a Service is served by".to_owned(),
        Outcome::PassedOwnAnswer => "an answer to a datagram that this node, or a pod behind its masquerade, sent from this port: the stack knows whose it is".to_owned(),
        Outcome::PassedOutOfWindow => "its sequence numbers (of SCTP: its verification tag) are not those of the flow with its addresses and ports, which has not begun or is over: a connection to the endpoint itself".to_owned(),
        Outcome::PassedIcmpNoFlow => "an ICMP error about a packet of no flow: the node's own business".to_owned(),
        Outcome::PassedNotService => "some Service uses this port, but not at this address: the node's own traffic".to_owned(),
        Outcome::PassedNoFlow => "a packet of a connection or association that is not known here: the stack answers it, or goes on with a connection of an earlier proxy".to_owned(),
        Outcome::PassedToConntrack => "its connection began under an earlier proxy and was adopted: conntrack translates it until it ends".to_owned(),
        Outcome::PassedToTc => "XDP could not finish it (next hop not resolved, device without XDP, too long, or in several buffers): TC takes it up".to_owned(),
        Outcome::PassedDelivered => "XDP has translated it already: it is on its way to an endpoint of this node".to_owned(),
        Outcome::PassedStaleFlow => "it belongs to the other direction of a flow, or to one whose other entry is gone".to_owned(),
        Outcome::PassedMissedTailCall => "the program that should have gone on with it is not in place".to_owned(),
        Outcome::PassedOtherHost => "the frame is for another machine's MAC address; a switch flooded it here".to_owned(),
    }
}

/// Returns the remedy if the outcome is unwanted; `None` if there is nothing to do.
#[must_use]
pub fn fix(outcome: Outcome, context: &Context<'_>) -> Option<String> {
    let (namespace, name) = context.name();
    let text = match outcome {
        Outcome::Forwarded
        | Outcome::ForwardedDirect
        | Outcome::ForwardedToOwner
        | Outcome::Replied
        | Outcome::Delivered
        | Outcome::DeliveredDirect
        | Outcome::RepliedDirect
        | Outcome::RepliedLocal
        | Outcome::RepliedToFront
        | Outcome::RepliedOpened
        | Outcome::RepliedRedirected
        | Outcome::Connected
        | Outcome::ForwardedIcmpError
        | Outcome::RepliedIcmpError
        | Outcome::DeliveredIcmpError
        | Outcome::RepliedLocalIcmpError
        | Outcome::Passed
        | Outcome::PassedOutOfWindow
        | Outcome::PassedIcmpNoFlow
        | Outcome::PassedNotService
        | Outcome::PassedOwnAnswer
        | Outcome::PassedToTc
        | Outcome::PassedToConntrack
        | Outcome::PassedDelivered
        | Outcome::PassedOtherHost => return None,
        Outcome::RejectedNoEndpoint => format!(
            "see whether its pods are ready and its selector fits: kubectl -n {namespace} get endpointslices -l kubernetes.io/service-name={name}"
        ),
        Outcome::RejectedTtlExceeded | Outcome::DroppedTtlExceeded => "none if it is a traceroute; otherwise look for a routing loop between the client and this node".to_owned(),
        Outcome::RejectedMtuExceeded => "none: path MTU discovery adapts, unless a firewall towards the client drops ICMP".to_owned(),
        Outcome::ResetNoFlow => "none if it is rare; if connections break often, raise --idle-established, or see whether packets of one connection come by several nodes: with --forwarding direct and --algorithm maglev it goes on".to_owned(),
        Outcome::RejectedUnknownPort => format!("use a port that the Service has, or add it: kubectl -n {namespace} get service {name}"),
        Outcome::DroppedNoLocalEndpoint => match context.frontend {
            Some(FrontendKind::ClusterIp) => format!("run a pod of {} on every node that has clients, or set internalTrafficPolicy: Cluster", context.service()),
            _ => format!(
                "let the load balancer check the healthCheckNodePort (type NodePort: annotation traffic-policy.io/health-check-node-port) so that it leaves out this node, run a pod of {} here, or set externalTrafficPolicy: Cluster",
                context.service()
            ),
        },
        Outcome::DroppedNoSnatPort => "widen --snat-ports, shorten the idle times of flows, or give the Service more endpoints".to_owned(),
        Outcome::DroppedTableFull => "raise --flow-entries (or --flow-entries-v6) after `cleanup`; `flows` shows who holds the table".to_owned(),
        Outcome::DroppedNoRoute => "see `ip route get` for the address on this node: routes to pods of other nodes come from the network plugin".to_owned(),
        Outcome::DroppedForwardingDisabled => {
            let device = context.device.unwrap_or("DEVICE");
            if context.client.is_some_and(|client| client.is_ipv6()) {
                format!("sysctl net.ipv6.conf.{device}.forwarding=1 (and net.ipv6.conf.all.forwarding=1)")
            } else {
                format!("sysctl net.ipv4.conf.{device}.forwarding=1 (net.ipv4.ip_forward=1 sets all devices)")
            }
        }
        Outcome::DroppedMtuExceeded => "give the devices on the way one MTU, or let the client set DF (path MTU discovery)".to_owned(),
        Outcome::DroppedSctpFragment => "let path MTU discovery work on the client's way (ICMP errors, one MTU): SCTP sends packets that fit, and IP need not cut them".to_owned(),
        Outcome::DroppedRateLimited => "look for what sends so many packets that must be refused: `monitor --drops` names the clients".to_owned(),
        Outcome::DroppedInternalError => "report it with the kernel's version and the device's driver: this should not happen".to_owned(),
        Outcome::DroppedSourceRange => format!(
            "add the client's range to spec.loadBalancerSourceRanges if it should be served: kubectl -n {namespace} edit service {name}"
        ),
        Outcome::DroppedMartianSource => "none if it was forged; if a router sends this node's own packets back to it, let it reach Services otherwise, or set --source-check off".to_owned(),
        Outcome::DroppedUnattachedDevice => "name the device with --device; `check` says of each tunnel whether programs can be attached to it".to_owned(),
        Outcome::DroppedUnallocatedClusterIp => "the client uses the address of a Service that is gone, or DNS still gives it: look the name up again".to_owned(),
        Outcome::DroppedOutOfWindow => "none: the client sends again what the pod awaits, and that is delivered; a forged segment is not".to_owned(),
        Outcome::DroppedUnknownEndpoint => "none if it is rare: the endpoint went while the packet was on its way; otherwise see whether the agents of both nodes read the same objects (`status`)".to_owned(),
        Outcome::PassedNotIp => "for VLANs, attach to the VLAN's own device too: --device".to_owned(),
        Outcome::PassedMalformed => "capture it at the sender if it should have been a request".to_owned(),
        Outcome::PassedUnsupportedProtocol if context.socket => "let the client use the address of an endpoint (a headless Service gives them), or run outside of this node".to_owned(),
        Outcome::PassedUnsupportedProtocol => "none; Services have no other protocols".to_owned(),
        Outcome::PassedFragment => "none if it is rare: fragments overtook each other; otherwise let the sender send datagrams that fit its MTU".to_owned(),
        Outcome::PassedUnsupportedHeader => "none, unless it should have been TCP, UDP or SCTP: then let the sender leave out its extension headers".to_owned(),
        Outcome::PassedNoFlow => "none: a client that gets RST connects anew".to_owned(),
        Outcome::PassedStaleFlow => "none if it is rare: the flow ended while this packet was on its way".to_owned(),
        Outcome::PassedMissedTailCall => "start the agent on this node: it puts all programs in place".to_owned(),
    };
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contexts() -> [Context<'static>; 3] {
        let full = Context {
            service: Some("shop/web"),
            frontend: Some(FrontendKind::NodePort),
            client: Some(IpAddr::from([192, 0, 2, 10])),
            device: Some("eth0"),
            socket: false,
        };
        [Context::default(), full, Context { frontend: Some(FrontendKind::ClusterIp), socket: true, ..full }]
    }

    #[test]
    fn refusals_have_a_cure_and_successes_none() {
        for context in &contexts() {
            for outcome in Outcome::ALL {
                let name = outcome.name();
                let refused = ["dropped", "rejected", "reset"].iter().any(|verb| name.starts_with(verb));
                let succeeded = !refused && !name.starts_with("passed");
                let fix = fix(*outcome, context);
                assert!(!refused || fix.is_some(), "{name}");
                assert!(!succeeded || fix.is_none(), "{name}: {fix:?}");
            }
        }
    }

    #[test]
    fn one_line_without_a_final_stop() {
        for context in &contexts() {
            for outcome in Outcome::ALL {
                for text in [Some(reason(*outcome, context)), fix(*outcome, context)].into_iter().flatten() {
                    assert!(!text.is_empty() && !text.contains('\n') && !text.ends_with('.'), "{text}");
                }
            }
        }
    }

    #[test]
    fn no_two_outcomes_have_the_same_reason() {
        let texts: std::collections::BTreeSet<String> =
            Outcome::ALL.iter().map(|outcome| reason(*outcome, &Context::default())).collect();
        assert_eq!(texts.len(), Outcome::ALL.len());
    }

    #[test]
    fn names_what_is_known() {
        let [unknown, node_port, cluster_ip] = contexts();
        let dropped = Outcome::DroppedNoLocalEndpoint;
        assert!(reason(dropped, &node_port).contains("Service shop/web has externalTrafficPolicy: Local"));
        assert!(reason(dropped, &cluster_ip).contains("internalTrafficPolicy: Local"));
        assert!(reason(dropped, &unknown).starts_with("the Service has"));
        assert!(reason(Outcome::DroppedSourceRange, &node_port).starts_with("192.0.2.10 is in none"));
        assert!(
            fix(Outcome::DroppedSourceRange, &node_port)
                .unwrap()
                .ends_with("kubectl -n shop edit service web")
        );
        assert!(
            fix(Outcome::DroppedForwardingDisabled, &node_port)
                .unwrap()
                .contains("net.ipv4.conf.eth0.forwarding=1")
        );
    }
}
