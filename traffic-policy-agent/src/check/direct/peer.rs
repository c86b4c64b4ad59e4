//! Another node: what it answers, of what is forwarded to it directly, and what fits on the way.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result};
use traffic_policy_cluster::model::{DirectTarget, Dispatch, Forwarding, Protocol};
use traffic_policy_dataplane::{
    inspect::{Choice, Nodes, Pinned, ServicePort, node_macs},
    node::{
        Answered, Header, Link, Network, ProbeWay, RouteTo,
        direct_probe::{self, Question},
    },
};

use super::super::Settings;

/// The lengths that are tried, in bytes, where a packet as long as the route's MTU is lost.
const LENGTHS: [u32; 8] = [8951, 8900, 1500, 1480, 1450, 1420, 1400, 1280];
const WITHIN: [Dispatch; 2] = [Dispatch::Ipip, Dispatch::Udp];

/// The answers of a node about one endpoint there, and the way to it.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    pub(super) endpoint: IpAddr,
    /// The name of the device of the route there.
    pub(super) device: String,
    /// The MTU of that route, and whether the route names it, or else the device.
    pub(super) mtu: u32,
    pub(super) of_route: bool,
    /// The answers to what travels within IP and within UDP: as they are, and asked to come back
    /// within an outer packet.
    pub(super) plain: [Answered; 2],
    pub(super) back: [Answered; 2],
    pub(super) length: Option<Length>,
    pub(super) by_mac: ByMac,
    /// Whether packets to this endpoint are sent to a MAC address now, and whether replies of some
    /// Service with endpoints there are to come back through this node.
    pub(super) uses_mac: bool,
    pub(super) uses_tunnel: bool,
}

/// The result for a packet as long as the route's MTU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Length {
    Fits,
    /// The packet is lost, and one of this length, in bytes, is answered.
    Only(u32),
    /// The packet is lost, and so are all of [`LENGTHS`].
    Unknown,
}

/// The result for a packet that is sent to a MAC address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ByMac {
    /// The route leads over a device without Ethernet.
    NoEthernet,
    /// The next hop is not resolved.
    NoNeighbour(IpAddr),
    /// The next hop is no node that has told its MAC address: a router.
    Router(IpAddr),
    /// The next hop is a node that finds endpoints by other settings than this one, or not at all.
    OtherSettings(IpAddr),
    Answered,
    Lost,
}

/// Asks the node of this name, once for each family.
///
/// # Errors
/// No packet can be sent there.
pub(super) async fn ask(settings: &Settings, name: &str) -> Result<Vec<Facts>> {
    let pinned = Pinned::open(&settings.pins)?;
    let nodes = Nodes::read(&pinned)?;
    let ports = ServicePort::all(&pinned)?;
    let links = Network::connect()?.0.links().await?;
    let mut all = Vec::new();
    for ipv6 in [false, true] {
        let is_there = |port: &ServicePort| {
            let mut endpoints = port.cluster.iter();
            endpoints.any(|endpoint| nodes.name(endpoint.node) == Some(name) && endpoint.opens.is_some())
        };
        let mut candidates: Vec<_> = ports
            .iter()
            .filter(|port| port.key.ipv6 == ipv6 && port.key.protocol == Protocol::Tcp && is_there(port))
            .collect();
        let uses_tunnel = candidates.iter().any(|port| port.forwarding == Forwarding::Tunnel);
        // What is sent to a MAC address is judged by the table of a Service that has one.
        candidates.sort_by_key(|port| !matches!(port.choice, Choice::Maglev(_)));
        let found = candidates.into_iter().find_map(|port| {
            let frontend = port.frontends.iter().find(|frontend| !frontend.kind.is_node_port())?;
            Some((port, frontend.address))
        });
        let Some((port, frontend)) = found else { continue };
        let there = |endpoint: &traffic_policy_cluster::model::Endpoint| {
            nodes.name(endpoint.node) == Some(name) && endpoint.opens.is_some()
        };
        let Some(endpoint) = port.cluster.iter().find(|endpoint| there(endpoint)) else { continue };
        let uses_mac = matches!(endpoint.opens, Some(Dispatch::L2 { .. })) && port.forwarding.is_direct();
        let target = DirectTarget { endpoint: endpoint.address.ip(), frontend, by_table: None };
        let owner = |client| {
            // A connection of another endpoint would be sent on, and get an entry there.
            port.owner(&pinned, client, frontend).ok().flatten().is_none_or(|owner| there(&owner))
        };
        all.push(Facts::look(&pinned, &links, &target, owner, (uses_mac, uses_tunnel))?);
    }
    anyhow::ensure!(
        !all.is_empty(),
        "no endpoint there that opens packets has a Service of TCP with a ClusterIP or a load balancer's address"
    );
    Ok(all)
}

impl Facts {
    fn look(
        pinned: &Pinned,
        links: &[Link],
        target: &DirectTarget,
        owner: impl Fn(SocketAddr) -> bool,
        (uses_mac, uses_tunnel): (bool, bool),
    ) -> Result<Self> {
        let ask_all = |ways: &[ProbeWay], length: Option<u32>| -> Result<Vec<Answered>> {
            let length = length.map(|length| length as usize);
            let ways = ways.iter().map(|way| Question::new(target, *way, length, |_| true));
            let answers = direct_probe::ask(&ways.collect::<Result<Vec<_>, _>>()?)?;
            Ok(answers.into_iter().collect::<Result<_, _>>()?)
        };
        // The first ones also resolve the next hop.
        let answers = ask_all(&ProbeWay::WITHIN, None).context("a packet cannot be sent")?;
        let (plain, back) = ([answers[0], answers[1]], [answers[2], answers[3]]);
        let route = RouteTo::of(target.endpoint).context("there is no route")?;
        let route =
            route.with_context(|| format!("{} is reached by no route of unicast", target.endpoint))?;
        let link = links.iter().find(|link| link.index == route.hop.link);
        let link = link.with_context(|| format!("the device of the route to {} is gone", target.endpoint))?;
        let mtu = route.mtu.map_or(link.mtu, |mtu| mtu.min(link.mtu));
        let answers = |length| -> Result<bool> {
            let way = WITHIN.iter().zip(plain).find(|(_, answered)| *answered != Answered::No);
            let Some((dispatch, _)) = way else { return Ok(false) };
            Ok(ask_all(&[ProbeWay::Within(*dispatch)], Some(length))? != [Answered::No])
        };
        let length = if plain == [Answered::No; 2] {
            None
        } else if answers(mtu)? {
            Some(Length::Fits)
        } else {
            let mut shorter = LENGTHS.into_iter().filter(|length| *length < mtu);
            let found = shorter.find_map(|length| match answers(length) {
                Ok(false) => None,
                answered => Some(answered.map(|_| length)),
            });
            Some(found.transpose()?.map_or(Length::Unknown, Length::Only))
        };
        let by_mac = by_mac(pinned, target, link, &route, owner)?;
        Ok(Self {
            endpoint: target.endpoint,
            device: link.name.clone(),
            mtu,
            of_route: mtu < link.mtu,
            plain,
            back,
            length,
            by_mac,
            uses_mac,
            uses_tunnel,
        })
    }
}

fn by_mac(
    pinned: &Pinned,
    target: &DirectTarget,
    link: &Link,
    route: &RouteTo,
    owner: impl Fn(SocketAddr) -> bool,
) -> Result<ByMac> {
    if link.header != Header::Ethernet {
        return Ok(ByMac::NoEthernet);
    }
    let hop = route.hop.address;
    let Some(mac) = route.hop.mac().context("the neighbour cannot be asked for")? else {
        return Ok(ByMac::NoNeighbour(hop));
    };
    match node_macs(pinned)?.get(&mac) {
        None => return Ok(ByMac::Router(hop)),
        Some(false) => return Ok(ByMac::OtherSettings(hop)),
        Some(true) => {}
    }
    let answered = Question::new(target, ProbeWay::ByMac { link: link.index, mac }, None, owner)
        .and_then(|question| direct_probe::ask(&[question])?.into_iter().collect::<Result<Vec<_>, _>>())
        .context("a frame cannot be sent")?;
    Ok(if answered == [Answered::No] { ByMac::Lost } else { ByMac::Answered })
}
