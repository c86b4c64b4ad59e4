//! Sources that no packet from outside can have: they create no flow, and get no answer.

use traffic_policy_testing::harness::{self, Device, Frontend, Hook, Setup, SourceCheck, Spot};
use traffic_policy_testing::packet::{Packet, flag};

use crate::table::{self, CLIENT_PORT, Case, ENDPOINT_PORT, PORT, Step, Terms};

const NODE: (Spot, u16) = (Spot::Node, PORT);
const VIP: (Spot, u16) = (Spot::Vip, PORT);
const NEAR: (Spot, u16) = (Spot::Near, ENDPOINT_PORT);
const MARTIAN: &str = "dropped-martian-source";

fn setup() -> Setup {
    Setup::of(Frontend::new(NODE.0, NODE.1).endpoints(&[NEAR]))
        .and(Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]))
        .and(Frontend::new(Spot::OtherVip, PORT).endpoints(&[]))
}

fn from(terms: Terms, source: &str) -> Packet {
    terms.request(NODE).source((source.parse().unwrap(), CLIENT_PORT))
}

/// RFC 6890 and RFC 1122 section 3.2.1.3: networks that are not valid sources, and addresses just
/// outside of them.
#[test]
fn reserved_networks() {
    table::run(|terms| {
        let (no_source, source) = if terms.v4() {
            (
                vec![
                    "0.0.0.0",
                    "0.255.255.255",
                    "127.0.0.1",
                    "127.255.255.255",
                    "224.0.0.1",
                    "239.255.255.255",
                    "240.0.0.1",
                    "255.255.255.255",
                ],
                vec!["1.0.0.0", "126.255.255.255", "128.0.0.0", "223.255.255.255"],
            )
        } else {
            (
                vec!["::", "::1", "ff00::", "ff02::1", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"],
                vec!["::2", "100::", "feff:ffff::1", "fd00:7f::1"],
            )
        };
        let dropped = no_source
            .into_iter()
            .map(|source| Case::new(source, setup(), [Step::dropped(&from(terms, source), MARTIAN)]));
        let forwarded = source.into_iter().map(|source| {
            let request = from(terms, source);
            let sent = terms
                .forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear)
                .source(terms.at((Spot::Node, 5555)));
            Case::new(source, setup(), [Step::new(&request, "forwarded", &sent)])
        });
        dropped.chain(forwarded).collect()
    });
}

/// The reply would return to this node, and be taken for a request again.
#[test]
fn addresses_of_this_node_and_of_its_frontends() {
    table::run(|terms| {
        let request = |source| terms.request(NODE).source(terms.at(source));
        let sent = terms.forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear);
        vec![
            Case::new("the frontend itself", setup(), [Step::dropped(&request(NODE), MARTIAN)]),
            Case::new(
                "this node, any port",
                setup(),
                [Step::dropped(&request((Spot::Node, CLIENT_PORT)), MARTIAN)],
            ),
            Case::new(
                "another address of this node",
                setup(),
                [Step::dropped(&request((Spot::NodeEth1, CLIENT_PORT)), MARTIAN)],
            ),
            Case::new("another frontend", setup(), [Step::dropped(&request(VIP), MARTIAN)]),
            // The address of a load balancer may be one of another node's addresses.
            Case::new(
                "a frontend's address, another port",
                setup(),
                [Step::new(&request((Spot::Vip, CLIENT_PORT)), "forwarded", &sent)],
            ),
            Case::new(
                "another client's address, a frontend's port",
                setup(),
                [Step::new(&request((Spot::Client, PORT)), "forwarded", &sent)],
            ),
            Case::new(
                "nobody is answered",
                setup(),
                [Step::dropped(
                    &terms.request((Spot::OtherVip, PORT)).source(terms.at((Spot::Node, CLIENT_PORT))),
                    MARTIAN,
                )],
            ),
        ]
    });
}

/// The packet arrives on an uplink, to which the programs are attached.
#[test]
fn pods_of_this_node() {
    table::run(|terms| {
        let request = |source| terms.request(NODE).source(terms.at((source, CLIENT_PORT)));
        let sent = terms.forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear);
        vec![
            Case::new("a pod here", setup(), [Step::dropped(&request(Spot::Local), MARTIAN)]),
            Case::new(
                "a pod of another node",
                setup(),
                [Step::new(&request(Spot::OtherNear), "forwarded", &sent)],
            ),
        ]
    });
}

#[test]
fn what_a_source_check_asks() {
    table::run(|terms| {
        let with = |check| setup().with(|setup| setup.source_check = check);
        let request = |source| terms.request(NODE).source(terms.at((source, CLIENT_PORT)));
        let sent = terms.forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear);
        let forwarded = |source| Step::new(&request(source), "forwarded", &sent);
        vec![
            Case::new("off", with(SourceCheck::Off), [forwarded(Spot::Node)]),
            Case::new(
                "martian does not ask for a way back",
                with(SourceCheck::Martian),
                [forwarded(Spot::Far)],
            ),
            Case::new("strict", with(SourceCheck::Strict), [forwarded(Spot::Client)]),
            Case::new(
                "strict: the way back is another device",
                with(SourceCheck::Strict),
                [Step::dropped(&request(Spot::Far), MARTIAN)],
            ),
            Case::new(
                "strict: no way back",
                with(SourceCheck::Strict),
                [Step::dropped(&request(Spot::Stranger), MARTIAN)],
            ),
        ]
    });
}

/// A segment or datagram of an established flow is not checked: the check costs new flows only.
#[test]
fn nothing_is_left_behind() {
    harness::with(|harness| {
        for terms in Terms::all() {
            harness.set_up(&setup());
            let spoofed = terms.request(NODE).source(terms.at(NODE));
            for packet in [
                spoofed.clone(),
                spoofed.with(|packet| {
                    if terms.tcp {
                        packet.tcp_mut().flags = flag::ACK;
                    }
                }),
            ] {
                harness.run(terms.hook, &packet).expect(MARTIAN);
            }
            assert_eq!(harness.flows(terms.family), []);
        }
    });
}

/// A process, or a masquerade for a pod, has sent a request from a port that is also a node port:
/// conntrack knows to which of them an answer belongs.
#[test]
fn answers_to_what_this_node_has_asked() {
    harness::with(|harness| {
        for terms in Terms::all() {
            harness.set_up(&setup());
            let server = (Spot::Client, 53);
            let answer = |terms: Terms| terms.request(NODE).source(terms.at(server));
            let question = terms.packet(NODE, server).macs(Device::Eth0.mac(), Spot::Router.mac());
            harness.run(Hook::Egress, &question).expect("passed");
            let expected = if terms.tcp { "forwarded" } else { "passed-own-answer" };
            harness.run(terms.hook, &answer(terms)).expect(expected);
            // Another server, another client: an ordinary request.
            let other = terms.request(NODE).source(terms.at((Spot::Client, 54)));
            harness.run(terms.hook, &other).expect(if terms.tcp {
                "dropped-no-snat-port"
            } else {
                "forwarded"
            });
        }
    });
}

/// The request alone identifies the answer, before anything of the answer is checked: its flow, its
/// source, the Service's endpoints.
#[test]
fn an_answer_is_known_by_its_question_alone() {
    harness::with(|harness| {
        for terms in Terms::all().filter(|terms| !terms.tcp) {
            let question = |server| terms.packet(NODE, server).macs(Device::Eth0.mac(), Spot::Router.mac());
            let answer = |server| terms.request(NODE).source(terms.at(server));
            let own = |harness: &harness::Harness, server, what| {
                harness.run(Hook::Egress, &question(server)).expect("passed");
                let ran = harness.run(terms.hook, &answer(server));
                assert_eq!(ran.outcome, "passed-own-answer", "{what}, {terms:?}");
            };
            // Each case begins with the outcome without the request: it shows the result of any
            // other order of checks.
            harness.set_up(&setup());
            harness.run(terms.hook, &answer(VIP)).expect(MARTIAN);
            own(harness, VIP, "a frontend's address and port");

            let server = (Spot::Client, 53);
            harness.set_up(&Setup::of(Frontend::new(NODE.0, NODE.1).endpoints(&[])));
            harness.run(terms.hook, &answer(server)).expect("rejected-no-endpoint");
            own(harness, server, "a Service without endpoints");

            harness.set_up(&setup());
            harness.run(terms.hook, &answer(server)).expect("forwarded");
            own(harness, server, "a flow that an answer has made before");
        }
    });
}
