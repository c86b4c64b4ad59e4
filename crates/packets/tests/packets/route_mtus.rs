//! Routes that name an MTU of their own, as the agent writes them to the map.

use traffic_policy_testing::harness::{Device, Frontend, Harness, Setup, Spot};
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::packet::Packet;

use crate::answers::too_long;
use crate::dialogue::everywhere;
use crate::table::{self, Case, ENDPOINT_PORT, PORT, Step, Terms};

const VIP: (Spot, u16) = (Spot::Vip, PORT);
const NEAR: (Spot, u16) = (Spot::Near, ENDPOINT_PORT);
const FAR: (Spot, u16) = (Spot::Far, ENDPOINT_PORT);
const SLIM: (Spot, u16) = (Spot::Slim, ENDPOINT_PORT);
const SILENT: (Spot, u16) = (Spot::Silent, ENDPOINT_PORT);

fn setup(endpoint: (Spot, u16)) -> Setup {
    Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[endpoint]))
}

/// Fills the packet with payload up to this length of the IP packet.
fn long(packet: Packet, terms: Terms, length: usize) -> Packet {
    let header = if terms.v4() { 20 } else { 40 } + if terms.tcp { 20 } else { 8 };
    packet.payload(&vec![7; length - header])
}

/// A packet that is too long: TC reports the MTU to the sender.
fn refused(terms: Terms, packet: &Packet, mtu: u16) -> Step {
    if terms.xdp() {
        Step::passed(packet, "passed-to-tc")
    } else {
        Step::new(packet, "rejected-mtu-exceeded", &too_long(packet, mtu))
    }
}

fn sent(terms: Terms, endpoint: (Spot, u16), device: Device, router: Spot, length: usize) -> Step {
    let request = long(terms.request(VIP), terms, length);
    let forwarded = long(terms.forwarded(VIP, endpoint, device, router), terms, length);
    Step::new(&request, "forwarded", &forwarded)
}

#[test]
fn the_narrower_of_route_and_device_counts() {
    table::run(|terms| {
        let request = |length| long(terms.request(VIP), terms, length);
        let near = |length| sent(terms, NEAR, Device::Eth0, Spot::RouterNear, length);
        let slim = |length| sent(terms, SLIM, Device::Slim0, Spot::RouterSlim, length);
        let mut cases = vec![
            Case::new(
                "the route's",
                setup(NEAR).route_mtu(Spot::Near, 1300),
                [refused(terms, &request(1301), 1300), near(1300), refused(terms, &request(1301), 1300)],
            ),
            Case::new(
                "the device's",
                setup(SLIM).route_mtu(Spot::Slim, 1450),
                [refused(terms, &request(1401), 1400), slim(1400)],
            ),
            Case::new("another route's", setup(NEAR).route_mtu(Spot::Far, 1300), [near(1400)]),
            Case::new("a route that names none", setup(NEAR).route_mtu(Spot::Near, 0), [near(1400)]),
        ];
        if !terms.xdp() {
            let silent = terms.forwarded(VIP, SILENT, Device::Eth0, Spot::RouterSilent);
            let silent =
                |length| long(silent.clone(), terms, length).macs(request(length).from, request(length).to);
            cases.push(Case::new(
                "of a neighbour that is not resolved, too",
                setup(SILENT).route_mtu(Spot::Silent, 1300),
                [refused(terms, &request(1301), 1300), Step::new(&request(1300), "forwarded", &silent(1300))],
            ));
        }
        cases
    });
}

#[test]
fn replies_are_judged_by_the_route_to_the_client() {
    table::run(|terms| {
        let reply = |length| long(terms.reply(FAR, Device::Eth1, Spot::RouterFar), terms, length);
        let replied = long(terms.replied(VIP), terms, 1300);
        vec![Case::new(
            "from an endpoint of another node",
            setup(FAR).route_mtu(Spot::Client, 1300),
            [
                sent(terms, FAR, Device::Eth1, Spot::RouterFar, 1400),
                refused(terms, &reply(1301), 1300).by(Device::Eth1),
                Step::new(&reply(1300), "replied", &replied).by(Device::Eth1),
            ],
        )]
    });
}

/// RFC 791: an IPv4 packet without DF is fragmented to the route's MTU.
#[test]
fn what_may_be_fragmented_is() {
    table::run(|terms| {
        if terms.xdp() || !terms.v4() {
            return Vec::new();
        }
        let may = |packet: Packet| packet.with(|p| p.dont_fragment = false);
        let whole = may(long(terms.forwarded(VIP, NEAR, Device::Eth0, Spot::RouterNear), terms, 1301));
        let second = whole.fragments(1280).remove(1);
        vec![Case::new(
            "into two pieces",
            setup(NEAR).route_mtu(Spot::Near, 1300),
            [Step::new(&may(long(terms.request(VIP), terms, 1301)), "forwarded", &second)],
        )]
    });
}

/// Stored next hops keep the MTU with which they were resolved, until the route epoch shows that it
/// may have changed.
#[test]
fn a_changed_mtu_holds_from_the_next_epoch_on() {
    everywhere(|harness, terms| {
        let request = long(terms.request(VIP), terms, 1400);
        harness.set_up(&setup(NEAR));
        let becomes =
            |harness: &Harness, outcome| drop(harness.run(terms.hook, &request).expect(outcome).clone());
        let too_long = if terms.xdp() { "passed-to-tc" } else { "rejected-mtu-exceeded" };
        becomes(harness, "forwarded");
        let narrow = setup(NEAR).route_mtu(Spot::Near, 1300);
        harness.write_route_mtus(&narrow).unwrap();
        harness.change_routes(|routes| routes.route_mtus = if terms.family == Family::V4 { 1 } else { 2 });
        becomes(harness, "forwarded");
        harness.change_routes(|routes| routes.route += 1);
        becomes(harness, too_long);
        // The map of a family is not looked up if none of its routes names an MTU.
        harness.change_routes(|routes| routes.route_mtus ^= 3);
        harness.change_routes(|routes| routes.route += 1);
        becomes(harness, "forwarded");
    });
}
