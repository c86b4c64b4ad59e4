//! The paths of translated packets: to endpoints on other nodes and on this one, and back.

use traffic_policy_testing::harness::{self, Device, Frontend, Hook, Setup, Spot};
use traffic_policy_testing::packet::flag;

use crate::table::{self, CLIENT_PORT, Case, ENDPOINT_PORT, PORT, Step, Terms};

const NODE: (Spot, u16) = (Spot::Node, PORT);
const VIP: (Spot, u16) = (Spot::Vip, PORT);
const NEAR: (Spot, u16) = (Spot::Near, ENDPOINT_PORT);
const FAR: (Spot, u16) = (Spot::Far, ENDPOINT_PORT);
const LOCAL: (Spot, u16) = (Spot::Local, ENDPOINT_PORT);

fn frontend((spot, port): (Spot, u16), endpoints: &[(Spot, u16)]) -> Frontend {
    Frontend::new(spot, port).endpoints(endpoints)
}

#[test]
fn endpoints_on_other_nodes() {
    table::run(|terms| {
        let mut cases = Vec::new();
        for (to, what) in [(NODE, "node port"), (VIP, "VIP")] {
            cases.push(Case::new(
                what,
                Setup::of(frontend(to, &[NEAR])),
                [
                    Step::new(
                        &terms.request(to),
                        "forwarded",
                        &terms.forwarded(to, NEAR, Device::Eth0, Spot::RouterNear),
                    ),
                    Step::new(
                        &terms.reply(NEAR, Device::Eth0, Spot::RouterNear),
                        "replied",
                        &terms.replied(to),
                    ),
                    Step::new(
                        &terms.request(to).ttl(3),
                        "forwarded",
                        &terms.forwarded(to, NEAR, Device::Eth0, Spot::RouterNear).ttl(2),
                    ),
                ],
            ));
        }
        cases.push(Case::new(
            "request in by one device, out by another, and back",
            Setup::of(frontend(NODE, &[FAR])),
            [
                Step::new(
                    &terms.request(NODE),
                    "forwarded",
                    &terms.forwarded(NODE, FAR, Device::Eth1, Spot::RouterFar),
                ),
                Step::new(&terms.reply(FAR, Device::Eth1, Spot::RouterFar), "replied", &terms.replied(NODE))
                    .by(Device::Eth1),
            ],
        ));
        cases
    });
}

/// The reply then leaves by the device of the request, to the MAC address that sent it.
#[test]
fn clients_without_a_route() {
    table::run(|terms| {
        let stranger = (Spot::Stranger, CLIENT_PORT);
        let request = terms.request(VIP).source(terms.at(stranger));
        let forwarded =
            terms.forwarded(VIP, NEAR, Device::Eth0, Spot::RouterNear).source(terms.at((Spot::Node, 5555)));
        let replied = terms.replied(VIP).destination(terms.at(stranger));
        vec![Case::new(
            "client without a route",
            Setup::of(frontend(VIP, &[NEAR])),
            [
                Step::new(&request, "forwarded", &forwarded),
                Step::new(&terms.reply(NEAR, Device::Eth0, Spot::RouterNear), "replied", &replied),
            ],
        )]
    });
}

#[test]
fn endpoints_on_this_node() {
    table::run(|terms| {
        let delivered = |to| terms.request(to).destination(terms.at(LOCAL));
        let answer = terms.answer(LOCAL, (Spot::Client, CLIENT_PORT)).ttl(63);
        let answered = |to| answer.clone().source(terms.at(to));
        let not_ours = terms.answer((Spot::Local, 9999), (Spot::Client, CLIENT_PORT));
        let other = terms.answer(LOCAL, (Spot::OtherClient, CLIENT_PORT));
        let steps = |to| {
            [
                Step::new(&terms.request(to), "delivered", &delivered(to)),
                Step::new(&answer, "replied-local", &answered(to)).leaving(),
                Step::new(&terms.request(to).ttl(1), "delivered", &delivered(to).ttl(1)),
                Step::passed(&not_ours, "passed").leaving(),
                Step::passed(&other, "passed-not-service").leaving(),
            ]
        };
        vec![
            Case::new("policy Cluster", Setup::of(frontend(NODE, &[LOCAL])), steps(NODE)),
            Case::new("VIP", Setup::of(frontend(VIP, &[LOCAL])), steps(VIP)),
            Case::new(
                "policy Local takes its own endpoint, whatever others there are",
                Setup::of(frontend(NODE, &[NEAR, FAR, NEAR, FAR, NEAR, FAR, NEAR, LOCAL]).local()),
                steps(NODE),
            ),
        ]
    });
}

/// The node's routes decide, as a slice need not name a node: an endpoint is local at the node's
/// own address, or behind the device of a pod.
#[test]
fn endpoints_on_this_node_by_their_route() {
    table::run(|terms| {
        [Spot::LocalByRoute, Spot::NodeEth1]
            .into_iter()
            .map(|spot| {
                let endpoint = (spot, ENDPOINT_PORT);
                let delivered = terms.request(NODE).destination(terms.at(endpoint));
                let answer = terms.answer(endpoint, (Spot::Client, CLIENT_PORT));
                let answered = answer.clone().source(terms.at(NODE));
                let again = terms.request(NODE).source(terms.at((Spot::OtherClient, CLIENT_PORT)));
                let again_delivered = again.clone().destination(terms.at(endpoint));
                Case::new(
                    "no node named",
                    Setup::of(frontend(NODE, &[endpoint])),
                    [
                        Step::new(&terms.request(NODE), "delivered", &delivered),
                        Step::new(&answer, "replied-local", &answered).leaving(),
                        Step::new(&again, "delivered", &again_delivered),
                    ],
                )
            })
            .collect()
    });
}

/// A tunnel without Ethernet header, for example. If the packet were delivered here, it would keep
/// the client's address, and the endpoint would answer the client directly.
#[test]
fn an_endpoint_of_another_node_behind_a_device_without_programs() {
    table::run(|terms| {
        let remote = (Spot::RemoteBehindPod0, ENDPOINT_PORT);
        let dropped = || Step::dropped(&terms.request(NODE), "dropped-unattached-device");
        let delivered = terms.request(NODE).destination(terms.at(LOCAL));
        vec![
            Case::new(
                "again and again, not by what the slot remembers either",
                Setup::of(frontend(NODE, &[remote])),
                [dropped(), dropped()],
            ),
            Case::new(
                "one of this node is delivered",
                Setup::of(frontend(NODE, &[LOCAL])),
                [Step::new(&terms.request(NODE), "delivered", &delivered)],
            ),
        ]
    });
}

#[test]
fn a_packet_that_xdp_delivered_is_not_new_in_tc() {
    table::run(|terms| {
        // The endpoint has the frontend's port; its address is neither that of a Service nor that
        // of the node.
        let local = (Spot::Local, PORT);
        let delivered = terms.request(NODE).destination(terms.at(local));
        vec![Case::new(
            "delivered, then seen again",
            Setup::of(frontend(NODE, &[local])),
            [
                Step::new(&terms.request(NODE), "delivered", &delivered.clone()),
                Step::passed(&delivered, "passed"),
            ],
        )]
    });
}

/// The delivered packet is left alone even if it is addressed to another frontend.
#[test]
fn a_delivered_packet_that_looks_like_another_request() {
    harness::with(|harness| {
        for terms in Terms::all().filter(|terms| terms.xdp()) {
            let own = (Spot::Node, PORT);
            harness.set_up(&Setup::of(frontend(VIP, &[own])).and(frontend(NODE, &[NEAR])));
            let ran = harness.run(Hook::Xdp, &terms.request(VIP));
            ran.expect("delivered").expect_frame(&terms.request(NODE));
            harness.run(Hook::Ingress, &terms.request(NODE)).expect("passed-delivered");
            harness
                .run(Hook::Ingress, &terms.request(NODE).source(terms.at((Spot::Client, 7))))
                .expect("forwarded");
        }
    });
}

#[test]
fn policy_local_without_an_endpoint_here() {
    table::run(|terms| {
        let setup = |until| Setup::of(frontend(NODE, &[NEAR]).local().drain_until(until));
        let now = monotonic();
        let forwarded = terms.forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear);
        let mut cases = vec![
            Case::new(
                "silently dropped",
                setup(0),
                [Step::dropped(&terms.request(NODE), "dropped-no-local-endpoint")],
            ),
            Case::new(
                "drained",
                setup(now - 1_000_000_000),
                [Step::dropped(&terms.request(NODE), "dropped-no-local-endpoint")],
            ),
            Case::new(
                "draining",
                setup(now + 60_000_000_000),
                [Step::new(&terms.request(NODE), "forwarded", &forwarded)],
            ),
        ];
        if terms.tcp {
            let segment = terms.request(NODE).with(|p| p.tcp_mut().flags = flag::ACK);
            cases.push(Case::new(
                "a segment of an unknown connection is dropped as silently",
                setup(0),
                [Step::dropped(&segment, "dropped-no-local-endpoint")],
            ));
        }
        cases
    });
}

pub(crate) fn monotonic() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).unwrap();
    std::time::Duration::from(now).as_nanos() as u64
}

/// A neighbour that is not resolved, or a path that XDP cannot take: TC handles it, and finds the
/// packet unchanged.
#[test]
fn what_xdp_cannot_finish() {
    table::run(|terms| {
        let silent = (Spot::Silent, ENDPOINT_PORT);
        let request = terms.request(NODE);
        let unresolved = if terms.xdp() {
            Step::passed(&request, "passed-to-tc")
        } else {
            // The kernel writes the MAC addresses.
            let sent = terms
                .forwarded(NODE, silent, Device::Eth0, Spot::RouterSilent)
                .macs(request.from, request.to);
            Step::new(&request, "forwarded", &sent)
        };
        let elsewhere = if terms.xdp() {
            Step::passed(&request, "passed-to-tc")
        } else {
            let sent = terms.forwarded(NODE, FAR, Device::Eth1, Spot::RouterFar);
            Step::new(&request, "forwarded", &sent)
        };
        let devices = |setup: Setup| setup.with(|setup| setup.devices[1].1 = false);
        vec![
            Case::new(
                "neighbour not resolved",
                Setup::of(frontend(NODE, &[silent])),
                [unresolved.clone(), unresolved],
            ),
            Case::new(
                "device that takes no frames from XDP",
                devices(Setup::of(frontend(NODE, &[FAR]))),
                [elsewhere.clone(), elsewhere],
            ),
        ]
    });
}

#[test]
fn ways_that_lead_nowhere() {
    table::run(|terms| {
        let unreachable = (Spot::Unreachable, ENDPOINT_PORT);
        // The kernel's answer is the same as for a local address; those are marked.
        let nowhere = (Spot::Stranger, ENDPOINT_PORT);
        vec![
            Case::new(
                "the route says unreachable",
                Setup::of(frontend(NODE, &[unreachable])),
                [Step::dropped(&terms.request(NODE), "dropped-no-route")],
            ),
            Case::new(
                "no route at all",
                Setup::of(frontend(NODE, &[nowhere])),
                [Step::dropped(&terms.request(NODE), "dropped-no-route")],
            ),
        ]
    });
}

#[test]
fn forwarding_off() {
    table::run_with(|harness, terms: Terms| {
        let sysctls = [("net.ipv4.conf.eth0.forwarding", "0"), ("net.ipv6.conf.eth0.forwarding", "0")];
        harness.namespace().sysctls(&sysctls).unwrap();
        vec![Case::new(
            "forwarding is off",
            Setup::of(frontend(NODE, &[NEAR])),
            [Step::dropped(&terms.request(NODE), "dropped-forwarding-disabled")],
        )]
    });
}
