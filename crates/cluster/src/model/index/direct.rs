//! Nodes of an [`Index`] that take part in direct forwarding.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use super::{Changes, Index, Indexed};
use crate::model::{
    Dispatch, DispatchChoice, Forwarding, FrontendKind, NodeInput, Protocol, ServiceName, Way, Ways,
    direct_nodes::{DirectNodes, DirectTarget, DirectTargets, Opener},
    object::DirectNode,
};

/// Everything from which it follows which nodes take part, and how: with thousands of nodes they
/// are judged when one of these changes, not with each endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Inputs {
    /// [`Index::direct_revision`] of the Leases.
    revision: u64,
    node_name: String,
    ways: Arc<Ways>,
    dispatch: DispatchChoice,
    choice: String,
    hold_direct: bool,
}

impl Inputs {
    fn of(input: &NodeInput, revision: u64) -> Self {
        Self {
            revision,
            node_name: input.node_name.clone(),
            ways: Arc::clone(&input.ways),
            dispatch: input.dispatch,
            choice: input.choice.clone(),
            hold_direct: input.hold_direct,
        }
    }
}

impl Index {
    /// A number that is another one after each change of what [`Self::direct_leases`] and
    /// [`Self::direct_nodes`] return.
    #[must_use]
    pub fn direct_revision(&self) -> u64 {
        self.direct_revision
    }

    /// The other nodes that open packets of either family, as far as this one may send them some,
    /// and what these travel in. `forwarding`: that of most Services; by `snat`, what any Service's
    /// packets travel in.
    #[must_use]
    pub fn direct_nodes(&self, forwarding: Forwarding) -> BTreeMap<String, Dispatch> {
        let all = self.context.direct.names.iter().flatten().filter(|(_, opener)| !opener.held);
        let used = all.filter_map(|(node, opener)| {
            let dispatch = match forwarding {
                Forwarding::Direct => opener.direct,
                Forwarding::Tunnel => opener.tunnel,
                Forwarding::Snat => opener.direct.or(opener.tunnel),
            };
            Some((node.clone(), dispatch?))
        });
        used.collect()
    }

    /// Finds, for each other node that opens packets and for each family, an endpoint there and a
    /// frontend of its Service that is on no node's own address, of TCP: by a packet to that, the
    /// node can be asked what gets there. Only Services that are forwarded directly count, and
    /// addresses from outside the cluster come first: a network may let a node send from those
    /// alone.
    #[must_use]
    pub fn direct_targets(&self) -> DirectTargets {
        let mut is_used = [false; 2];
        // By number, not by name: a cluster has far more endpoints than nodes, and this is asked
        // for again while they change.
        let mut nodes = [false, true].map(|ipv6| {
            let opening = self.direct.values().filter(|other| other.opens_family(ipv6));
            let numbers = opening.map(|other| self.context.numbers.get(&other.node));
            // The packet, and whether its frontend has an address from inside the cluster.
            let unknown = numbers.filter(|number| *number != 0).map(|number| (number, None));
            unknown.collect::<HashMap<_, Option<(bool, DirectTarget)>>>()
        });
        for (key, port) in self.desired.ports.iter().filter(|(_, port)| port.forwarding.is_direct()) {
            let family = usize::from(key.ipv6);
            let frontends = port.frontends.iter().filter_map(|frontend| match frontend.kind {
                FrontendKind::NodePort | FrontendKind::LoopbackNodePort | FrontendKind::OpenedNodePort => {
                    None
                }
                kind => Some((kind == FrontendKind::ClusterIp, frontend.address)),
            });
            let frontend = frontends.min().filter(|_| key.protocol == Protocol::Tcp);
            for endpoint in port.cluster.iter().filter(|endpoint| endpoint.remote) {
                let Some(held) = nodes[family].get_mut(&endpoint.node) else { continue };
                let better = frontend
                    .filter(|(is_inside, _)| held.is_none_or(|(was_inside, _)| was_inside && !is_inside));
                let address = endpoint.address.ip();
                if is_used[family] && better.is_none() || self.context.direct.addresses.contains(&address) {
                    continue;
                }
                is_used[family] = true;
                if let Some((is_inside, frontend)) = better {
                    *held = Some((is_inside, DirectTarget { endpoint: address, frontend }));
                }
            }
        }
        let mut of = BTreeMap::new();
        for (targets, ipv6) in nodes.into_iter().zip([false, true]) {
            of.extend(targets.into_iter().filter_map(|(number, target)| {
                Some(((self.context.numbers.name(number)?.to_owned(), ipv6), target?.1))
            }));
        }
        DirectTargets { of, is_used }
    }

    /// All nodes with a Lease of direct forwarding, this one among them.
    pub fn direct_leases(&self) -> impl Iterator<Item = &DirectNode> {
        self.direct.values()
    }

    /// Takes over the nodes that take part in direct forwarding, without this one.
    pub(super) fn note_direct_nodes(&mut self, input: &NodeInput, changes: &mut Changes) {
        if self.direct_judged.as_ref() == Some(&Inputs::of(input, self.direct_revision)) {
            return;
        }
        self.judge_direct_nodes(input, changes);
        self.direct_judged = Some(Inputs::of(input, self.direct_revision));
    }

    fn judge_direct_nodes(&mut self, input: &NodeInput, changes: &mut Changes) {
        #[cfg(test)]
        {
            self.direct_judgements += 1;
        }
        let others = || self.direct.values().filter(|other| other.node != input.node_name);
        let opening = || others().filter(|other| other.opens);
        let names = [false, true].map(|ipv6| {
            let of_this = opening().filter(|other| other.opens_family(ipv6));
            let not_asked = input.ways.to_others(ipv6);
            of_this
                .filter_map(|other| {
                    let known = input.ways.known(&other.node, ipv6);
                    let awaited = known.is_none() && input.ways.are_awaited(ipv6);
                    // A router sends this node connections of others as soon as it is there. What
                    // is lost until the endpoint's node knows this one is sent again; an RST would
                    // end the connection. A flow keeps its way, so that passes what does so nearly
                    // everywhere.
                    let way = known.unwrap_or(if awaited { Way::WITHIN_UDP } else { not_asked });
                    let alike = other.choice.as_ref() == Some(&input.choice);
                    let within = |passing| {
                        let dispatch = input.dispatch.towards(&other.dispatches, passing)?;
                        Some(if alike { dispatch } else { dispatch.within() })
                    };
                    let tunnel = within(way.tunnel).filter(|_| other.tunnels);
                    let held = input.hold_direct || awaited;
                    let opener = Opener { direct: within(way.direct), tunnel, sctp: other.sctp, held };
                    let is_used = opener.direct.is_some() || opener.tunnel.is_some();
                    is_used.then(|| (other.node.clone(), opener))
                })
                .collect()
        });
        let mut macs = BTreeMap::new();
        for other in others() {
            let takes = other.opens && other.dispatches.contains(&Dispatch::L2 { else_udp: false });
            for mac in &other.macs {
                // Two machines with one address are told apart by nobody.
                macs.entry(*mac).and_modify(|all| *all &= takes).or_insert(takes);
            }
        }
        let direct = DirectNodes {
            names,
            macs,
            addresses: others().flat_map(|other| other.addresses.iter().copied()).collect(),
        };
        if *self.context.direct == direct {
            return;
        }
        self.direct_revision += 1;
        let former = std::mem::replace(&mut self.context.direct, Arc::new(direct.clone()));
        if former.addresses != direct.addresses || former.macs != direct.macs {
            self.desired.direct_nodes.clone_from(&direct.addresses);
            self.desired.direct_macs.clone_from(&direct.macs);
            changes.direct_nodes = true;
        }
        if former.addresses.is_empty() || direct.addresses.is_empty() {
            // Endpoints on this node are opened for from now on, or no longer.
            self.dirty.extend(self.services.keys().cloned());
        } else {
            for (former, names) in former.names.iter().zip(&direct.names) {
                self.concern_nodes(&differing(former, names));
            }
        }
    }
}

/// Returns the nodes that one of two maps lacks, or has with another way.
fn differing<'a>(
    former: &'a BTreeMap<String, Opener>,
    names: &'a BTreeMap<String, Opener>,
) -> BTreeSet<&'a str> {
    let in_either = former.keys().chain(names.keys());
    in_either.filter(|node| former.get(*node) != names.get(*node)).map(String::as_str).collect()
}

impl Indexed for DirectNode {
    fn apply(self, index: &mut Index) -> bool {
        if self.is_held(index) {
            return false;
        }
        index.direct.insert(self.name.clone(), self);
        index.direct_revision += 1;
        true
    }

    fn delete(name: &ServiceName, index: &mut Index) -> bool {
        let found = index.direct.remove(name).is_some();
        index.direct_revision += u64::from(found);
        found
    }

    fn name(&self) -> ServiceName {
        self.name.clone()
    }

    fn names(index: &Index) -> Vec<ServiceName> {
        index.direct.keys().cloned().collect()
    }

    fn is_held(&self, index: &Index) -> bool {
        index.direct.get(&self.name) == Some(self)
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use crate::model::{Algorithm, Passing, direct_nodes::Opens, object::Service};

    fn node(node: &str, address: &str) -> DirectNode {
        let name = ServiceName { namespace: "n".to_owned(), name: format!("direct-{node}") };
        DirectNode {
            name,
            node: node.to_owned(),
            opens: true,
            dispatches: vec![Dispatch::Ipip],
            sctp: false,
            tunnels: false,
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
            (Some(Way { direct: udp, tunnel: udp }), both(Dispatch::Udp)),
            (Some(Way { direct: Passing::NONE, tunnel: udp }), [None, Some(Dispatch::Udp)]),
            (Some(Way::CLOSED), [None; 2]),
        ] {
            let mut ways = Ways::default();
            way.map(|way| ways.set("there", false, way));
            let mut input =
                NodeInput { node_name: "here".to_owned(), ways: Arc::new(ways), ..NodeInput::default() };
            index.update(&input);
            assert_eq!(open(&index), auto, "{way:?}");
            assert_eq!(
                index.direct_nodes(Forwarding::Snat).contains_key("there"),
                auto != [None; 2],
                "{way:?}"
            );
            input.dispatch = DispatchChoice::Only(Dispatch::Ipip);
            index.update(&input);
            assert_eq!(open(&index), both(Dispatch::Ipip), "{way:?}: somebody has chosen");
        }
    }

    /// A router sends a node that is new connections of others at once, before that may begin any.
    #[test]
    fn connections_go_on_where_new_ones_wait() {
        let mut index = Index::default();
        index.apply(DirectNode {
            dispatches: vec![Dispatch::Ipip, Dispatch::Udp],
            ..node("there", "192.0.2.1")
        });
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
        }
    }
}
