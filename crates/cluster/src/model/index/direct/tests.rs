//! The nodes that take part in direct forwarding, by their Leases, and the way to each.

use std::net::IpAddr;

use super::*;
use crate::model::{
    Algorithm, Passing,
    direct_nodes::Opens,
    object::{EndpointSlice, Port, Service, SliceEndpoint, SlicePort},
};

fn node(node: &str, address: &str) -> DirectNode {
    let name = ServiceName { namespace: "n".to_owned(), name: format!("direct-{node}") };
    DirectNode {
        name,
        node: node.to_owned(),
        opens: true,
        dispatches: vec![Dispatch::Ipip],
        sctp: false,
        tunnels: false,
        tunnels_sctp: false,
        addresses: vec![address.parse().unwrap()],
        macs: Vec::new(),
        choice: None,
        says_more: false,
        owner: None,
    }
}

#[test]
fn others_may_send_and_this_node_is_no_other() {
    let mut index = Index::default();
    let input = NodeInput { node_name: "here".to_owned(), ..NodeInput::default() };
    assert!(index.apply(node("here", "192.0.2.1")) && index.apply(node("there", "192.0.2.2")));
    assert!(index.update(&input).direct_nodes);
    let addresses =
        |index: &Index| index.desired().direct_nodes.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(addresses(&index), ["192.0.2.2"]);
    assert!(!index.apply(node("there", "192.0.2.2")));
    assert!(!index.update(&input).direct_nodes);
    assert!(index.delete::<DirectNode>(&node("there", "192.0.2.2").name));
    assert!(index.update(&input).direct_nodes);
    assert!(addresses(&index).is_empty());
}

#[test]
fn a_lease_says_what_its_agent_runs_with() {
    let of = |choice: &str| DirectNode { choice: Some(choice.to_owned()), ..node("a", "192.0.2.1") };
    let direct = Some((Forwarding::Direct, Algorithm::Maglev));
    assert_eq!(of("direct maglev 16381 6d61676c65760001").settings(), direct);
    assert_eq!(of("snat random 251 1").settings(), Some((Forwarding::Snat, Algorithm::Random)));
    for other in ["", "direct", "other maglev", "direct other 251"] {
        assert_eq!(of(other).settings(), None, "{other:?}");
    }
    assert_eq!(node("a", "192.0.2.1").settings(), None);
}

#[test]
fn nodes_are_judged_when_they_change_alone() {
    let mut index = Index::default();
    let mut input = NodeInput { node_name: "here".to_owned(), ..NodeInput::default() };
    index.apply(node("there", "192.0.2.2"));
    let judged = |index: &mut Index, input: &NodeInput| {
        let (judgements, revision) = (index.direct_judgements, index.direct_revision());
        index.update(input);
        (index.direct_judgements - judgements, index.direct_revision() > revision)
    };
    assert_eq!(judged(&mut index, &input), (1, true));
    assert_eq!(judged(&mut index, &input), (0, false));
    index.apply(Service::unserved(ServiceName::default()));
    assert_eq!(judged(&mut index, &input), (0, false), "a Service has changed");
    let revision = index.direct_revision();
    index.apply(node("there", "192.0.2.3"));
    assert!(index.direct_revision() > revision);
    assert_eq!(judged(&mut index, &input), (1, true));
    input.hold_direct = true;
    assert_eq!(judged(&mut index, &input), (1, true));
    input.dispatch = DispatchChoice::Only(Dispatch::Udp);
    assert_eq!(judged(&mut index, &input), (1, true), "connections that go on have no way now");
    input.choice = "other".to_owned();
    assert_eq!(judged(&mut index, &input), (1, false));
    let mut ways = Ways::default();
    ways.set("there", false, Way::CLOSED);
    input.ways = Arc::new(ways);
    assert_eq!(judged(&mut index, &input), (1, false));
    input.node_name = "there".to_owned();
    assert_eq!(judged(&mut index, &input), (1, true), "this node is no other");
    let revision = index.direct_revision();
    assert!(index.delete::<DirectNode>(&node("there", "192.0.2.2").name));
    assert!(index.direct_revision() > revision);
    assert_eq!(judged(&mut index, &input), (1, false));
}

#[test]
fn one_that_opens_nothing_may_still_send() {
    let mut index = Index::default();
    let input = NodeInput { node_name: "here".to_owned(), ..NodeInput::default() };
    let names = |index: &Index| index.direct_nodes(Forwarding::Snat).into_keys().collect::<Vec<_>>();
    index.apply(node("there", "192.0.2.2"));
    index.update(&NodeInput { hold_direct: true, ..input.clone() });
    assert!(names(&index).is_empty() && index.desired().direct_nodes.len() == 1, "this one waits");
    index.update(&input);
    assert_eq!(names(&index), ["there"]);
    index.apply(DirectNode { opens: false, ..node("there", "192.0.2.2") });
    assert!(!index.update(&input).direct_nodes, "its flows go on");
    assert!(names(&index).is_empty() && index.desired().direct_nodes.len() == 1);
}

/// More addresses than the maps take: the nodes that are known stay, and others are left out whole,
/// until there is room.
#[test]
fn nodes_without_room_are_left_out() {
    let limits = Limits { direct_nodes: 3, direct_macs: 4, ..Limits::default() };
    let input = NodeInput { node_name: "here".to_owned(), limits, ..NodeInput::default() };
    let mut index = Index::default();
    let told = |index: &mut Index| {
        index.update(&input);
        let desired = index.desired();
        let used = index.direct_nodes(Forwarding::Direct).into_keys().collect::<Vec<_>>().join(" ");
        let without = index.direct_without_room().iter().cloned().collect::<Vec<_>>().join(" ");
        (used, without, desired.direct_nodes.len(), desired.direct_macs.len())
    };
    let of =
        |used: &str, without: &str, addresses, macs| (used.to_owned(), without.to_owned(), addresses, macs);
    let mac = |last| [2, 0, 0, 0, 0, last];
    for (name, last) in [("here", 1), ("m", 2), ("n", 3)] {
        index.apply(DirectNode { macs: vec![mac(last)], ..node(name, &format!("192.0.2.{last}")) });
    }
    assert_eq!(told(&mut index), of("m n", "", 2, 2));
    // A name that comes first, with more addresses than there is room for; and one that still fits.
    let two = ["192.0.2.4", "192.0.2.5"].map(|address| address.parse().unwrap());
    index.apply(DirectNode { addresses: two.into(), macs: vec![mac(4)], ..node("a", "192.0.2.4") });
    assert_eq!(told(&mut index), of("m n", "a", 2, 2));
    index.apply(node("z", "192.0.2.6"));
    assert_eq!(told(&mut index), of("m n z", "a", 3, 2));
    // IPv6 has room of its own.
    index.apply(node("six", "2001:db8::6"));
    assert_eq!(told(&mut index), of("m n six z", "a", 4, 2));
    // An address that another Lease names, too, takes no room.
    index.apply(node("twin", "192.0.2.6"));
    assert_eq!(told(&mut index), of("m n six twin z", "a", 4, 2));
    assert!(index.delete::<DirectNode>(&node("m", "::").name));
    assert_eq!(told(&mut index), of("n six twin z", "a", 3, 1));
    assert!(index.delete::<DirectNode>(&node("n", "::").name));
    assert_eq!(told(&mut index), of("a six twin z", "", 4, 1));
    // MAC addresses: four are there with these, and there is no room for one more.
    index.apply(DirectNode { macs: (5..9).map(mac).collect(), ..node("b", "2001:db8::7") });
    assert_eq!(told(&mut index), of("a six twin z", "b", 4, 1));
    index.apply(DirectNode { macs: (5..8).map(mac).collect(), ..node("b", "2001:db8::7") });
    assert_eq!(told(&mut index), of("a b six twin z", "", 5, 4));
    // A node that is known and has a further address comes before one that is not known.
    assert!(index.delete::<DirectNode>(&node("twin", "::").name));
    index.apply(node("a", "192.0.2.4"));
    assert_eq!(told(&mut index), of("a b six z", "", 4, 3));
    let two = ["192.0.2.6", "192.0.2.9"].map(|address| address.parse().unwrap());
    index.apply(DirectNode { addresses: two.into(), ..node("z", "192.0.2.6") });
    index.apply(node("0", "192.0.2.10"));
    assert_eq!(told(&mut index), of("a b six z", "0", 5, 3));
}

/// The endpoint is named to a node whose table may be another one.
#[test]
fn only_a_node_with_the_same_table_finds_the_endpoint() {
    let l2 = Dispatch::L2 { else_udp: false };
    let choice = "maglev, 251 slots".to_owned();
    let input = NodeInput {
        node_name: "here".to_owned(),
        dispatch: DispatchChoice::Only(l2),
        choice: choice.clone(),
        ..NodeInput::default()
    };
    let mac = [2, 0, 0, 0, 0, 1];
    let endpoint: IpAddr = "198.51.100.1".parse().unwrap();
    let other = |dispatches: &[Dispatch], choice: &str| DirectNode {
        dispatches: dispatches.to_vec(),
        macs: vec![mac],
        choice: Some(choice.to_owned()),
        ..node("there", "192.0.2.2")
    };
    for (lease, used, takes) in [
        (other(&Dispatch::ALL, &choice), l2, true),
        (other(&Dispatch::ALL, "random"), Dispatch::Ipip, true),
        (other(&[Dispatch::Ipip], &choice), Dispatch::Ipip, false),
    ] {
        let mut index = Index::default();
        index.apply(lease);
        assert!(index.update(&input).direct_nodes);
        assert_eq!(
            index.context.direct.open(endpoint, Some("there"), (Forwarding::Direct, Protocol::Tcp)).all,
            Some(used)
        );
        assert_eq!(index.desired().direct_macs, BTreeMap::from([(mac, takes)]));
        // A clone that takes none: the address of both is that of a node, and takes none.
        index.apply(DirectNode { opens: false, macs: vec![mac], ..node("clone", "192.0.2.3") });
        assert!(index.update(&input).direct_nodes);
        assert_eq!(index.desired().direct_macs, BTreeMap::from([(mac, false)]));
    }
}

/// `auto` uses the outer packets that the node has answered, `direct` and `tunnel` separately.
#[test]
fn packets_travel_in_what_gets_there() {
    let mut index = Index::default();
    let dispatches = vec![Dispatch::Ipip, Dispatch::Udp];
    let there = DirectNode { dispatches, tunnels: true, ..node("there", "192.0.2.1") };
    assert!(index.apply(there));
    let udp = Passing { within_udp: true, ..Passing::NONE };
    let open = |index: &Index| {
        let address = "198.51.100.1".parse().unwrap();
        [Forwarding::Direct, Forwarding::Tunnel]
            .map(|way| index.context.direct.open(address, Some("there"), (way, Protocol::Tcp)).all)
    };
    let both = |dispatch| [Some(dispatch); 2];
    for (way, auto) in [
        (None, both(Dispatch::Ipip)),
        (Some(Way::OPEN), both(Dispatch::Ipip)),
        (Some(Way { direct: udp, tunnel: udp, by_mac: false }), both(Dispatch::Udp)),
        (Some(Way { tunnel: udp, ..Way::CLOSED }), [None, Some(Dispatch::Udp)]),
        (Some(Way::CLOSED), [None; 2]),
    ] {
        let mut ways = Ways::default();
        way.map(|way| ways.set("there", false, way));
        let mut input =
            NodeInput { node_name: "here".to_owned(), ways: Arc::new(ways), ..NodeInput::default() };
        index.update(&input);
        assert_eq!(open(&index), auto, "{way:?}");
        assert_eq!(index.direct_nodes(Forwarding::Snat).contains_key("there"), auto != [None; 2], "{way:?}");
        input.dispatch = DispatchChoice::Only(Dispatch::Ipip);
        index.update(&input);
        assert_eq!(open(&index), both(Dispatch::Ipip), "{way:?}: somebody has chosen");
    }
}

/// A router sends a node that is new connections of others at once, before that may begin any.
#[test]
fn connections_go_on_where_new_ones_wait() {
    let mut index = Index::default();
    index.apply(DirectNode { dispatches: vec![Dispatch::Ipip, Dispatch::Udp], ..node("there", "192.0.2.1") });
    let mut awaited = Ways::default();
    awaited.hold([true; 2]);
    let mut found_out = awaited.clone();
    let within_udp = Passing { within_udp: true, ..Passing::NONE };
    found_out.set("there", false, Way { direct: within_udp, ..Way::CLOSED });
    let mut silent = awaited.clone();
    silent.set("there", false, Way::CLOSED);
    let [ipip, udp] = [Dispatch::Ipip, Dispatch::Udp].map(Some);
    for (hold_direct, ways, all, held) in [
        (true, Ways::default(), None, ipip),
        (true, awaited.clone(), None, udp),
        (true, found_out.clone(), None, udp),
        (false, awaited, None, udp),
        (false, found_out, udp, None),
        (false, silent, None, None),
    ] {
        let input = NodeInput {
            node_name: "here".to_owned(),
            ways: Arc::new(ways),
            hold_direct,
            ..NodeInput::default()
        };
        index.update(&input);
        let address = "198.51.100.1".parse().unwrap();
        let way = (Forwarding::Direct, Protocol::Tcp);
        let opens = index.context.direct.open(address, Some("there"), way);
        assert_eq!(opens, Opens { all, held }, "{hold_direct}");
        assert_eq!(index.direct_nodes(Forwarding::Direct).contains_key("there"), all.is_some());
    }
}

/// A node that is about to go gets no new flows, but connections of its pods, which may come by
/// another node from now on. One of which another node has said that it opens nothing, because its
/// agent is silent, names no dispatch.
#[test]
fn connections_go_on_to_a_node_that_says_itself_that_it_opens_nothing() {
    let address = "198.51.100.1".parse().unwrap();
    for (dispatches, held) in [(vec![Dispatch::Udp, Dispatch::Ipip], Some(Dispatch::Udp)), (Vec::new(), None)]
    {
        let mut index = Index::default();
        let input = NodeInput { node_name: "here".to_owned(), ..NodeInput::default() };
        index.apply(DirectNode { opens: false, dispatches, ..node("there", "192.0.2.1") });
        index.update(&input);
        let opens = index.context.direct.open(address, Some("there"), (Forwarding::Direct, Protocol::Tcp));
        assert_eq!(opens, Opens { all: None, held });
        assert!(index.direct_nodes(Forwarding::Direct).is_empty());
    }
}

/// An agent of a former version answers the client itself, which the network may forbid.
#[test]
fn replies_come_back_from_nodes_that_know_it_alone() {
    let mut index = Index::default();
    let input = NodeInput { node_name: "here".to_owned(), ..NodeInput::default() };
    let newer = DirectNode { tunnels: true, ..node("newer", "192.0.2.2") };
    assert!(index.apply(node("older", "192.0.2.1")) && index.apply(newer));
    index.update(&input);
    let address = "198.51.100.1".parse().unwrap();
    let opens = |index: &Index, node, way| {
        index.context.direct.open(address, Some(node), (way, Protocol::Tcp)).all.is_some()
    };
    for (node, direct, tunnel) in [("older", true, false), ("newer", true, true)] {
        let found = [Forwarding::Direct, Forwarding::Tunnel].map(|way| opens(&index, node, way));
        assert_eq!(found, [direct, tunnel], "{node}");
    }
    index.apply(DirectNode { tunnels: true, ..node("older", "192.0.2.1") });
    index.update(&input);
    assert!(opens(&index, "older", Forwarding::Tunnel), "it was upgraded");
}

/// A node has started anew with another address, and a pod in its network namespace is known there
/// before its Lease is: it opens nothing at its own addresses.
#[test]
fn an_endpoint_at_an_address_that_a_node_gets_later_is_not_sent_to_directly() {
    let of_node = "192.0.2.3".parse().unwrap();
    let name = |name: &str| ServiceName { namespace: "n".to_owned(), name: name.to_owned() };
    let mut index = Index::default();
    let input = NodeInput {
        node_name: "here".to_owned(),
        ipv4: true,
        forwarding: Forwarding::Direct,
        ..NodeInput::default()
    };
    index.apply(Service {
        cluster_ips: vec!["10.96.0.1".parse().unwrap()],
        ipv4: true,
        ports: vec![Port { name: String::new(), protocol: Protocol::Tcp, port: 80, node_port: 0 }],
        ..Service::unserved(name("web"))
    });
    index.apply(EndpointSlice {
        name: name("web-1"),
        service: "web".to_owned(),
        ports: vec![SlicePort { name: String::new(), protocol: Protocol::Tcp, port: 8080 }],
        endpoints: vec![SliceEndpoint::new(of_node, Some("there"), true)],
        ..EndpointSlice::default()
    });
    index.apply(node("there", "192.0.2.2"));
    index.set_synced();
    let opens = |index: &mut Index| {
        index.update(&input);
        index.desired().ports.values().next().unwrap().cluster[0].opens.is_some()
    };
    assert!(opens(&mut index), "it may be a pod's");
    index.apply(node("there", "192.0.2.3"));
    assert!(!opens(&mut index));
}

#[test]
fn a_node_opens_packets_of_the_families_of_its_addresses() {
    let mut index = Index::default();
    let input = NodeInput { node_name: "here".to_owned(), ..NodeInput::default() };
    assert!(index.apply(node("v4", "192.0.2.1")) && index.apply(node("v6", "2001:db8::1")));
    assert!(index.update(&input).direct_nodes);
    for (node, address, opens) in [
        ("v4", "198.51.100.1", true),
        ("v4", "2001:db8:1::1", false),
        ("v6", "198.51.100.1", false),
        ("v6", "2001:db8:1::1", true),
    ] {
        let address: IpAddr = address.parse().unwrap();
        let found = index.context.direct.open(address, Some(node), (Forwarding::Direct, Protocol::Tcp));
        assert_eq!(found.all, opens.then_some(Dispatch::Ipip), "{node} {address}");
    }
}

#[test]
fn a_node_that_does_not_say_so_opens_no_sctp() {
    let mut index = Index::default();
    let input = NodeInput { node_name: "here".to_owned(), ..NodeInput::default() };
    index.apply(node("earlier", "192.0.2.1"));
    index.apply(DirectNode { sctp: true, ..node("present", "192.0.2.2") });
    // Their replies come back through the node in front only if the node says that.
    index.apply(DirectNode { sctp: true, tunnels: true, ..node("back", "192.0.2.3") });
    let all = DirectNode { sctp: true, tunnels: true, tunnels_sctp: true, ..node("all", "192.0.2.4") };
    index.apply(all);
    index.update(&input);
    let opens = |node, protocol| {
        index.context.direct.open("198.51.100.1".parse().unwrap(), Some(node), protocol).all.is_some()
    };
    for (protocol, earlier) in [(Protocol::Tcp, true), (Protocol::Udp, true), (Protocol::Sctp, false)] {
        assert_eq!(
            [
                opens("earlier", (Forwarding::Direct, protocol)),
                opens("present", (Forwarding::Direct, protocol))
            ],
            [earlier, true]
        );
        for (node, tunnels) in [("earlier", false), ("present", false), ("back", earlier), ("all", true)] {
            assert_eq!(opens(node, (Forwarding::Tunnel, protocol)), tunnels, "{node}, {protocol:?}");
        }
    }
}
