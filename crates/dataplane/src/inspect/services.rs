//! The Services that the packet path knows.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::SocketAddr,
    time::Duration,
};

use anyhow::{Result, ensure};
use ipnet::IpNet;
use traffic_policy_cluster::model::{
    Endpoint, Forwarding, FrontendKind, Policy, ServiceName, ServicePortKey,
};
use traffic_policy_ebpf::abi::{
    Address, Address4, Address6, Frontend, FrontendKey, IndexRange, ServiceInfo, Slot, frontend,
    frontend_kind, policy, scope,
};

use super::pinned::Pinned;
use crate::dataplane::{
    clock,
    maps::{
        keys::{self, FromWire},
        reader::{Pod, Reader},
    },
    sync::former::Former,
};

/// A Service port of one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    pub key: ServicePortKey,
    /// The index by which flows and counts refer to it.
    pub index: u32,
    pub external_policy: Policy,
    pub internal_policy: Policy,
    /// The frontends, sorted by address.
    pub frontends: Vec<FrontendView>,
    /// The endpoints for policy Cluster.
    pub cluster: Vec<Endpoint>,
    /// The endpoints for policy Local.
    pub local: Vec<Endpoint>,
    /// The time for which a client stays with its endpoint.
    pub affinity: Option<Duration>,
    /// The sources that may use its load balancer addresses; empty for all.
    pub source_ranges: Vec<IpNet>,
    pub choice: Choice,
    /// The tables of former owners.
    pub former: Former,
    /// The way of its packets to endpoints of other nodes that open them; all others are
    /// [`Forwarding::Snat`].
    pub forwarding: Forwarding,
}

/// The choice of the endpoint of a new connection from outside, from the list for policy Cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    Random,
    /// The Maglev table of this many slots, from this element of `tp_maglev` on, names the
    /// endpoint.
    Maglev(IndexRange),
    /// The choice is random, although the Service asks for a Maglev table: there is no endpoint, or
    /// no room.
    WithoutTable,
}

/// An address on which a Service port is reachable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrontendView {
    pub address: SocketAddr,
    pub kind: FrontendKind,
    /// The policy that applies at this address.
    pub policy: Policy,
    pub phase: Phase,
}

/// The treatment of a new connection from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Active,
    /// The policy is Local, there is no endpoint here, and for this time connections are still
    /// forwarded to other nodes.
    Draining(Duration),
    /// The policy is Local, there is no endpoint here, and the Service's annotation makes this node
    /// forward as under policy Cluster.
    Fallback,
    /// The policy is Local and there is no endpoint here: connections are dropped.
    NoLocalEndpoint,
    /// There is no endpoint anywhere: connections are rejected.
    Rejecting,
}

impl Phase {
    fn of(frontend: &Frontend, now: u64) -> Self {
        if frontend.flags & frontend::HAS_ENDPOINTS == 0 {
            return Self::Rejecting;
        }
        if frontend.flags & frontend::LOCAL == 0 || frontend.local.len > 0 {
            return if frontend.flags & frontend::LOCAL == 0 && frontend.cluster.len == 0 {
                Self::Rejecting
            } else {
                Self::Active
            };
        }
        match frontend.drain_until.saturating_sub(now) {
            0 => Self::NoLocalEndpoint,
            rest => Self::Draining(Duration::from_nanos(rest)),
        }
    }
}

/// Returns the kind of a frontend with these flags; `None` for the one that no client reaches: the
/// node port of packets that another node has forwarded directly.
pub fn frontend_kind(flags: u32) -> Option<FrontendKind> {
    Some(match frontend::kind(flags) {
        frontend_kind::CLUSTER_IP => FrontendKind::ClusterIp,
        frontend_kind::NODE_PORT => FrontendKind::NodePort,
        frontend_kind::LOAD_BALANCER => FrontendKind::LoadBalancer,
        frontend_kind::EXTERNAL_IP => FrontendKind::ExternalIp,
        frontend_kind::LOOPBACK => FrontendKind::LoopbackNodePort,
        _ => return None,
    })
}

/// Returns the frontend as it is evaluated: clients on loopback are processes of the node only, to
/// which the external policy does not apply.
fn as_judged(mut frontend: Frontend, kind: FrontendKind) -> Frontend {
    if kind == FrontendKind::LoopbackNodePort {
        frontend.flags &= !frontend::LOCAL;
    }
    frontend
}

/// Whether a frontend with these flags, of a Service with external policy Local, has policy Cluster
/// in the maps: in that case there is no endpoint here, and the Service's annotation makes this
/// node forward.
pub fn falls_back(external_policy: Policy, flags: u32) -> bool {
    external_policy == Policy::Local
        && !matches!(frontend::kind(flags), frontend_kind::CLUSTER_IP | frontend_kind::LOOPBACK)
        && flags & frontend::LOCAL == 0
}

fn policy(local: bool) -> Policy {
    if local { Policy::Local } else { Policy::Cluster }
}

/// Returns the Service port that a [`ServiceInfo`] names; `None` if its protocol is not known.
pub fn service_key(info: &ServiceInfo) -> Option<ServicePortKey> {
    let text = |bytes: &[u8]| {
        let length = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    };
    Some(ServicePortKey {
        service: ServiceName { namespace: text(&info.namespace), name: text(&info.name) },
        port: text(&info.port),
        protocol: keys::protocol(info.protocol.into())?,
        ipv6: info.ipv6 != 0,
    })
}

/// Returns the external policy of a Service, as it is configured.
pub fn external_policy(info: &ServiceInfo) -> Policy {
    policy(info.policies & policy::EXTERNAL_LOCAL != 0)
}

/// Returns the names of Service ports by their index.
pub fn service_names(pinned: &Pinned) -> Result<BTreeMap<u32, ServicePortKey>> {
    let entries = pinned.map("tp_svc_names")?.entries::<u32, ServiceInfo>()?;
    Ok(entries.into_iter().filter_map(|(index, info)| Some((index, service_key(&info)?))).collect())
}

impl ServicePort {
    /// Returns all Service ports, by name.
    pub fn all(pinned: &Pinned) -> Result<Vec<Self>> {
        Self::read(pinned, |_| |_| true)
    }

    /// Returns the Service ports that have one of these frontends, by name. The endpoints of all
    /// others are not read, which takes most of the time.
    pub fn with_frontends(pinned: &Pinned, wanted: &BTreeSet<SocketAddr>) -> Result<Vec<Self>> {
        Self::read(pinned, |entries| {
            let services: BTreeSet<u32> = entries.services_at(wanted).collect();
            move |index| services.contains(&index)
        })
    }

    fn read<W: Fn(u32) -> bool>(pinned: &Pinned, wanted: impl FnOnce(&Entries) -> W) -> Result<Vec<Self>> {
        let infos = pinned.map("tp_svc_names")?.entries::<u32, ServiceInfo>()?;
        let entries = Entries::read(pinned)?;
        let is_wanted = wanted(&entries);
        let mut ports: HashMap<u32, ServicePort> = infos
            .into_iter()
            .filter(|(index, _)| is_wanted(*index))
            .filter_map(|(index, info)| {
                let port = ServicePort {
                    key: service_key(&info)?,
                    index,
                    external_policy: external_policy(&info),
                    internal_policy: policy(info.policies & policy::INTERNAL_LOCAL != 0),
                    frontends: Vec::new(),
                    cluster: Vec::new(),
                    local: Vec::new(),
                    affinity: None,
                    source_ranges: Vec::new(),
                    former: Former::default(),
                    forwarding: Forwarding::Snat,
                    choice: if info.policies & policy::MAGLEV == 0 {
                        Choice::Random
                    } else {
                        Choice::WithoutTable
                    },
                };
                Some((index, port))
            })
            .collect();
        add_frontends(&entries.of4, &pinned.map("tp_endpoints4")?, entries.now, &mut ports)?;
        add_frontends(&entries.of6, &pinned.map("tp_endpoints6")?, entries.now, &mut ports)?;
        add_source_ranges::<1>(pinned, "tp_src_ranges4", false, &mut ports)?;
        add_source_ranges::<4>(pinned, "tp_src_ranges6", true, &mut ports)?;
        let mut ports: Vec<_> = ports.into_values().collect();
        ports.sort_by(|a, b| a.key.cmp(&b.key));
        for port in &mut ports {
            port.frontends.sort_by_key(|reached| (reached.kind, reached.address));
            port.source_ranges.sort();
        }
        Ok(ports)
    }
}

/// The frontends in the maps.
struct Entries {
    of4: Vec<(FrontendKey<Address4>, Frontend)>,
    of6: Vec<(FrontendKey<Address6>, Frontend)>,
    /// CLOCK_MONOTONIC in nanoseconds once all of them had been read: by an earlier time a drain
    /// that has just begun would seem to last longer than it does.
    now: u64,
}

impl Entries {
    fn read(pinned: &Pinned) -> Result<Self> {
        let (of4, of6) = (pinned.map("tp_frontends4")?.entries()?, pinned.map("tp_frontends6")?.entries()?);
        Ok(Self { of4, of6, now: clock::monotonic()? })
    }

    /// Returns the indices of the Service ports with a frontend at one of these addresses.
    fn services_at(&self, wanted: &BTreeSet<SocketAddr>) -> impl Iterator<Item = u32> {
        let of4 = self.of4.iter().filter(|(key, _)| wanted.contains(&address(key)));
        let of6 = self.of6.iter().filter(|(key, _)| wanted.contains(&address(key)));
        of4.map(|(_, frontend)| frontend.service).chain(of6.map(|(_, frontend)| frontend.service))
    }
}

fn address<A: Address + FromWire>(key: &FrontendKey<A>) -> SocketAddr {
    SocketAddr::new(key.address.to_ip(), key.port.to_host())
}

fn add_frontends<A: Address + FromWire>(
    entries: &[(FrontendKey<A>, Frontend)],
    slots: &Reader,
    now: u64,
    ports: &mut HashMap<u32, ServicePort>,
) -> Result<()>
where
    Slot<A>: Pod,
{
    for (key, frontend) in entries {
        if key.scope == scope::CLUSTER_IP {
            continue;
        }
        let Some(port) = ports.get_mut(&frontend.service) else { continue };
        let Some(kind) = frontend_kind(frontend.flags) else { continue };
        let falls_back = falls_back(port.external_policy, frontend.flags);
        let frontend = as_judged(*frontend, kind);
        port.frontends.push(FrontendView {
            address: address(key),
            kind,
            policy: policy(falls_back || frontend.flags & frontend::LOCAL != 0),
            phase: match Phase::of(&frontend, now) {
                Phase::Active if falls_back => Phase::Fallback,
                phase => phase,
            },
        });
        if frontend.affinity != 0 {
            port.affinity = Some(Duration::from_secs(frontend.affinity.into()));
        }
        if frontend.flags & frontend::MAGLEV != 0 {
            port.choice = Choice::Maglev(frontend.maglev);
            port.former = Former::of(&frontend);
        }
        if frontend.flags & frontend::DIRECT != 0 {
            let tunnels = frontend.flags & frontend::TUNNEL != 0;
            port.forwarding = if tunnels { Forwarding::Tunnel } else { Forwarding::Direct };
        }
        // All frontends of a Service port have the same lists.
        if port.cluster.is_empty() {
            port.cluster = endpoints::<A>(slots, frontend.cluster)?;
        }
        if port.local.is_empty() {
            port.local = endpoints::<A>(slots, frontend.local)?;
        }
    }
    Ok(())
}

fn add_source_ranges<const W: usize>(
    pinned: &Pinned,
    map: &str,
    ipv6: bool,
    ports: &mut HashMap<u32, ServicePort>,
) -> Result<()> {
    for source in keys::read_sources::<W>(&pinned.map(map)?, ipv6)? {
        if let Some(port) = ports.get_mut(&source.service) {
            port.source_ranges.push(source.range);
        }
    }
    Ok(())
}

/// Returns the endpoints in these slots.
pub(super) fn endpoints<A: Address + FromWire>(slots: &Reader, range: IndexRange) -> Result<Vec<Endpoint>>
where
    Slot<A>: Pod,
{
    let mut endpoints = Vec::with_capacity(range.len as usize);
    let places = range.base..range.base.saturating_add(range.len);
    slots.elements::<Slot<A>>(places, |slot| endpoints.push(keys::endpoint(&slot)))?;
    ensure!(endpoints.len() == range.len as usize, "a list of endpoints ends beyond its map");
    Ok(endpoints)
}

#[cfg(test)]
mod tests {
    use traffic_policy_cluster::model::Protocol;

    use super::*;

    #[test]
    fn phases() {
        let range = |len| IndexRange { base: 7, len };
        let local = frontend::LOCAL | frontend::HAS_ENDPOINTS;
        let of = |flags, cluster, local, drain_until| {
            let frontend = Frontend {
                flags,
                cluster: range(cluster),
                local: range(local),
                drain_until,
                ..Frontend::default()
            };
            Phase::of(&frontend, 1_000)
        };
        assert_eq!(of(frontend::HAS_ENDPOINTS, 2, 0, 0), Phase::Active);
        assert_eq!(of(local, 2, 1, 0), Phase::Active);
        assert_eq!(of(local, 2, 1, 9_000), Phase::Active, "a local endpoint ends it");
        assert_eq!(of(local, 2, 0, 0), Phase::NoLocalEndpoint);
        assert_eq!(of(local, 2, 0, 1_000), Phase::NoLocalEndpoint);
        assert_eq!(of(local, 2, 0, 3_000), Phase::Draining(Duration::from_nanos(2_000)));
        assert_eq!(of(frontend::LOCAL, 0, 0, 9_000), Phase::Rejecting);
        assert_eq!(of(0, 0, 0, 0), Phase::Rejecting);
        let loopback = Frontend { flags: local, cluster: range(2), ..Frontend::default() };
        assert_eq!(Phase::of(&as_judged(loopback, FrontendKind::NodePort), 0), Phase::NoLocalEndpoint);
        assert_eq!(Phase::of(&as_judged(loopback, FrontendKind::LoopbackNodePort), 0), Phase::Active);
    }

    #[test]
    fn what_falls_back() {
        let of = |policy, kind: u32, flags| falls_back(policy, kind << frontend::KIND_SHIFT | flags);
        assert!(of(Policy::Local, frontend_kind::NODE_PORT, frontend::HAS_ENDPOINTS));
        assert!(!of(Policy::Local, frontend_kind::NODE_PORT, frontend::LOCAL));
        assert!(!of(Policy::Cluster, frontend_kind::NODE_PORT, 0));
        assert!(!of(Policy::Local, frontend_kind::CLUSTER_IP, 0), "the internal policy is another");
        assert!(!of(Policy::Local, frontend_kind::LOOPBACK, 0), "it is for processes of the node");
    }

    #[test]
    fn names_end_at_the_first_zero() {
        let mut info = ServiceInfo {
            namespace: [0; 64],
            name: [b'x'; 64],
            port: [0; 64],
            protocol: 17,
            ipv6: 1,
            policies: 0,
            zero: 0,
        };
        info.namespace[..4].copy_from_slice(b"shop");
        let key = service_key(&info).unwrap();
        assert_eq!(key.service.to_string(), format!("shop/{}", "x".repeat(64)));
        assert_eq!((key.port.as_str(), key.protocol, key.ipv6), ("", Protocol::Udp, true));
        info.protocol = 33;
        assert_eq!(service_key(&info), None, "not known");
    }
}
