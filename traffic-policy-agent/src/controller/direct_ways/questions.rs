//! The questions to other nodes, each in all ways at once, by MAC address those that have answered:
//! they are resolved by then.

use std::{collections::BTreeSet, io, net::SocketAddr, path::Path};

use traffic_policy_cluster::model::{DirectTarget, Passing, Protocol, Way};
use traffic_policy_dataplane::{
    inspect::{Nodes, Pinned, ServicePort},
    node::{
        Answered, ProbeWay, RouteTo,
        direct_probe::{self, Question},
    },
};

use super::{Macs, Other};

/// Asks nodes by these packets, and returns the way to each. Blocks for up to two seconds. `pins`:
/// the folder of the maps, by which nodes can be asked by MAC address.
///
/// # Errors
/// No packet can be sent, or no answer be seen.
pub(super) fn ask(
    others: &[Other],
    targets: &[DirectTarget],
    macs: &Macs,
    pins: Option<&Path>,
) -> io::Result<Vec<Way>> {
    let mut ways = within(targets)?;
    let mut asked = Vec::new();
    for (number, target) in
        targets.iter().enumerate().filter(|(number, _)| ways[*number].direct != Passing::NONE)
    {
        if let Some(by_mac) = target.by_table.and_then(|frontend| Some((frontend, next_hop(target, macs)?))) {
            asked.push((number, by_mac));
        }
    }
    let Some(pins) = pins.filter(|_| !asked.is_empty()) else { return Ok(ways) };
    let frontends = asked.iter().map(|(_, (frontend, _))| *frontend).collect();
    match Tables::read(pins, &frontends) {
        Ok(tables) => by_mac(others, targets, &asked, &tables, &mut ways)?,
        // They travel within outer packets.
        Err(error) => tracing::debug!("no node is asked by its MAC address: {error:#}"),
    }
    Ok(ways)
}

/// Returns the way by MAC address, if the next hop is a node that takes such packets.
fn next_hop(target: &DirectTarget, macs: &Macs) -> Option<ProbeWay> {
    // What cannot be found out travels within an outer packet.
    let hop = RouteTo::of(target.endpoint).ok()??.hop;
    let mac = hop.mac().ok()?.filter(|mac| macs.get(mac) == Some(&true))?;
    Some(ProbeWay::ByMac { link: hop.link, mac })
}

/// Service ports in the maps, by which the owner of a connection is found.
struct Tables {
    pinned: Pinned,
    nodes: Nodes,
    ports: Vec<ServicePort>,
}

impl Tables {
    /// Reads the Service ports of these frontends.
    fn read(pins: &Path, frontends: &BTreeSet<SocketAddr>) -> anyhow::Result<Self> {
        let pinned = Pinned::open(pins)?;
        let ports = ServicePort::with_frontends(&pinned, frontends)?;
        Ok(Self { nodes: Nodes::read(&pinned)?, ports, pinned })
    }

    /// Whether a node has the endpoint of a client's connection to a frontend. It sends a segment
    /// for another one's on, and the answer is none to this node then.
    fn is_owner(&self, node: &str, client: SocketAddr, frontend: SocketAddr) -> bool {
        let has_it = |port: &&ServicePort| {
            port.key.protocol == Protocol::Tcp && port.frontends.iter().any(|one| one.address == frontend)
        };
        let port = self.ports.iter().find(has_it);
        let owner = port.and_then(|port| port.owner(&self.pinned, client, frontend).ok().flatten());
        owner.is_some_and(|owner| self.nodes.name(owner.node) == Some(node))
    }
}

/// Asks nodes by MAC address; `asked`: the number of each, a frontend, and the way.
fn by_mac(
    others: &[Other],
    targets: &[DirectTarget],
    asked: &[(usize, (SocketAddr, ProbeWay))],
    tables: &Tables,
    ways: &mut [Way],
) -> io::Result<()> {
    let mut questions = Vec::new();
    let mut numbers = Vec::new();
    for (number, (frontend, way)) in asked {
        let (node, _) = &others[*number];
        let fits = |client| tables.is_owner(node, client, *frontend);
        match Question::new(&DirectTarget { frontend: *frontend, ..targets[*number] }, *way, None, fits) {
            Ok(question) => {
                questions.push(question);
                numbers.push(*number);
            }
            Err(error) if lacks_route(&error) => {}
            Err(error) => return Err(error),
        }
    }
    for (number, answered) in numbers.into_iter().zip(direct_probe::ask(&questions)?) {
        ways[number].by_mac = answered.is_ok_and(|answered| answered != Answered::No);
    }
    Ok(())
}

fn within(targets: &[DirectTarget]) -> io::Result<Vec<Way>> {
    let mut questions = Vec::new();
    let mut numbers = Vec::new();
    for (number, target) in targets.iter().enumerate() {
        for (way, of) in ProbeWay::WITHIN.into_iter().enumerate() {
            match Question::new(target, of, None, |_| true) {
                Ok(question) => {
                    questions.push(question);
                    numbers.push((number, way));
                }
                Err(error) if lacks_route(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }
    let answers = direct_probe::ask(&questions)?;
    let mut ways = vec![[Answered::No; ProbeWay::WITHIN.len()]; targets.len()];
    for ((number, way), answered) in numbers.into_iter().zip(answers) {
        ways[number][way] = answered.unwrap_or(Answered::No);
    }
    Ok(ways.into_iter().map(way).collect())
}

/// Returns the way that answers to [`ProbeWay::WITHIN`] show.
fn way([ip, udp, back_ip, back_udp]: [Answered; 4]) -> Way {
    let (any, back) = (|answered| answered != Answered::No, |answered| answered == Answered::Within);
    Way {
        direct: Passing { within_ip: any(ip), within_udp: any(udp) },
        tunnel: Passing { within_ip: back(back_ip), within_udp: back(back_udp) },
        by_mac: false,
    }
}

/// Whether nothing can get there from this node.
fn lacks_route(error: &io::Error) -> bool {
    use io::ErrorKind::{AddrNotAvailable, HostUnreachable, NetworkUnreachable};
    matches!(error.kind(), AddrNotAvailable | HostUnreachable | NetworkUnreachable)
}

/// Whether it is this process that may not ask: see socket(2).
pub(super) fn are_refused(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied || error.raw_os_error() == Some(libc::EAFNOSUPPORT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_show_the_way() {
        use Answered::{AsItIs, No, Within};
        let [ip, udp] =
            [(true, false), (false, true)].map(|(within_ip, within_udp)| Passing { within_ip, within_udp });
        for (answers, direct, tunnel) in [
            ([AsItIs, AsItIs, Within, Within], Passing::ALL, Passing::ALL),
            ([No, AsItIs, No, Within], udp, udp),
            ([AsItIs, No, Within, No], ip, ip),
            ([No, No, Within, Within], Passing::NONE, Passing::ALL),
            // An agent of a former version answers the client itself.
            ([AsItIs, No, AsItIs, No], ip, Passing::NONE),
            ([No; 4], Passing::NONE, Passing::NONE),
        ] {
            assert_eq!(way(answers), Way { direct, tunnel, by_mac: false }, "{answers:?}");
        }
    }
}
