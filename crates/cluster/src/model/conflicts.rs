//! Conflicts of frontends: when several Services name the same address, port and protocol, the one
//! whose kind of frontend ranks highest holds it; among equals, the oldest.

use std::{
    collections::{BTreeSet, HashMap},
    net::SocketAddr,
    sync::Arc,
};

use super::{Frontend, FrontendKind, Protocol, ServiceName, ServicePortKey};

/// An address as the packet path sees it.
type Slot = (SocketAddr, Protocol);

/// A Service port's claim to a frontend. Claims are ordered by precedence: the kind first, so that
/// no Service takes over a ClusterIP by naming it as an external IP, then the older Service, then
/// the name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Claim {
    rank: u8,
    created: i64,
    /// Shared, because a Service may name very many frontends.
    key: Arc<ServicePortKey>,
    kind: FrontendKind,
}

fn rank(kind: FrontendKind) -> u8 {
    match kind {
        // The API server gives each ClusterIP to one Service only.
        FrontendKind::ClusterIp => 0,
        // Written by a controller.
        FrontendKind::LoadBalancer => 1,
        // Any user may name any address.
        FrontendKind::ExternalIp => 2,
        FrontendKind::NodePort | FrontendKind::LoopbackNodePort | FrontendKind::OpenedNodePort => 3,
    }
}

/// The number of claimants of a frontend or a health port, in order of precedence, whose warning
/// names the holder; the warning of the others refers to one of many Services before them. So a
/// change concerns at most this number, however many Services of a tenant claim one address.
pub(super) const NAMED: usize = 10;

/// The holder of a frontend that another Service port also claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holder<'a> {
    Named(&'a ServiceName),
    /// A Service that is not named to this claimant; see [`NAMED`].
    OneOfMany,
}

/// All frontends that Services name, each with its claimants.
#[derive(Clone, Debug, Default)]
pub(super) struct Claims(HashMap<Slot, Vec<Claim>>);

impl Claims {
    /// Adds a claim of a Service created at `created` (seconds since 1970; `i64::MAX`: not known).
    /// Adds the Services that this affects to `touched`.
    pub(super) fn add(
        &mut self,
        created: i64,
        key: &Arc<ServicePortKey>,
        frontend: Frontend,
        touched: &mut BTreeSet<ServiceName>,
    ) {
        let claim = Claim::new(created, key, frontend);
        let claims = self.0.entry((frontend.address, key.protocol)).or_insert_with(|| Vec::with_capacity(1));
        let at = claims.partition_point(|other| *other < claim);
        // The last of the named claimants moves out of the first [`NAMED`].
        touch(claims, at, touched);
        claims.insert(at, claim);
    }

    /// Removes a claim, given as it was added. Adds the Services that this affects to `touched`.
    pub(super) fn remove(
        &mut self,
        created: i64,
        key: &Arc<ServicePortKey>,
        frontend: Frontend,
        touched: &mut BTreeSet<ServiceName>,
    ) {
        let slot = (frontend.address, key.protocol);
        let Some(claims) = self.0.get_mut(&slot) else { return };
        let Ok(at) = claims.binary_search(&Claim::new(created, key, frontend)) else { return };
        claims.remove(at);
        touch(claims, at, touched);
        if claims.is_empty() {
            self.0.remove(&slot);
        }
    }

    /// Returns the claimant that holds this frontend instead of `key`; `None` if `key` holds it.
    pub(super) fn lost_to(&self, key: &ServicePortKey, frontend: Frontend) -> Option<Holder<'_>> {
        let claims = self.0.get(&(frontend.address, key.protocol))?;
        let holder = claims.first()?.key.as_ref();
        if holder == key {
            return None;
        }
        let named = claims.iter().take(NAMED).any(|claim| *claim.key == *key);
        Some(if named { Holder::Named(&holder.service) } else { Holder::OneOfMany })
    }
}

impl Claim {
    fn new(created: i64, key: &Arc<ServicePortKey>, frontend: Frontend) -> Self {
        Self { rank: rank(frontend.kind), created, key: Arc::clone(key), kind: frontend.kind }
    }
}

/// Notes the Services that are affected by adding or removing a claim before `at`; `claims` are the
/// others. If the claim was the holder's, these are the first [`NAMED`]; if it was another of the
/// first, the one that is or was the last of them.
fn touch(claims: &[Claim], at: usize, touched: &mut BTreeSet<ServiceName>) {
    let concerned = match at {
        0 => 0..NAMED,
        1..NAMED => NAMED - 1..NAMED,
        _ => return,
    };
    let named = claims.iter().take(concerned.end).skip(concerned.start);
    touched.extend(named.map(|claim| claim.key.service.clone()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::FrontendKind::ExternalIp;

    fn key(number: u32) -> Arc<ServicePortKey> {
        let service = ServiceName { namespace: "ns".to_owned(), name: format!("s{number:05}") };
        Arc::new(ServicePortKey { service, port: String::new(), protocol: Protocol::Tcp, ipv6: false })
    }

    const FRONTEND: Frontend = Frontend {
        address: SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(198, 51, 100, 1)), 80),
        kind: ExternalIp,
    };

    /// Every claimant whose warning differs after a change is touched by it.
    #[test]
    fn a_change_touches_few_of_many_claimants() {
        let mut claims = Claims::default();
        let heard = |claims: &Claims| -> Vec<String> {
            (0..40).map(|number| format!("{:?}", claims.lost_to(&key(number), FRONTEND))).collect()
        };
        let mut before = heard(&claims);
        let mut check = |claims: &Claims, own: u32, touched: &BTreeSet<ServiceName>| {
            assert!(touched.len() <= NAMED, "{touched:?}");
            let after = heard(claims);
            for number in (0..40).filter(|number| *number != own) {
                let changed = before[number as usize] != after[number as usize];
                let mut claims = claims.0.get(&(FRONTEND.address, Protocol::Tcp)).into_iter().flatten();
                let claims = claims.any(|claim| claim.key.service == key(number).service);
                assert!(!claims || !changed || touched.contains(&key(number).service), "{own}: {number}");
            }
            before = after;
        };
        let order = (0..40).map(|i| i * 17 % 40);
        for number in order.clone() {
            let mut touched = BTreeSet::new();
            claims.add(i64::from(number / 3), &key(number), FRONTEND, &mut touched);
            check(&claims, number, &touched);
        }
        for number in order {
            let mut touched = BTreeSet::new();
            claims.remove(i64::from(number / 3), &key(number), FRONTEND, &mut touched);
            check(&claims, number, &touched);
        }
        assert!(claims.0.is_empty());
    }
}
