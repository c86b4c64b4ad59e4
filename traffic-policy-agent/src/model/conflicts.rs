//! Conflicts of frontends: of several Services that name one address, port and protocol, the one has it whose address it is in the
//! strictest sense; of equals, the oldest.

use std::{
    collections::{BTreeSet, HashMap},
    net::SocketAddr,
    sync::Arc,
};

use super::{Frontend, FrontendKind, Protocol, ServiceName, ServicePortKey};

/// An address as the packet path knows it.
type Slot = (SocketAddr, Protocol);

/// Ordered by right: the kind first, so that no Service takes a ClusterIP over by naming it as external IP, then the older Service,
/// then by name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Claim {
    rank: u8,
    created: i64,
    /// Shared: a Service may name very many frontends.
    key: Arc<ServicePortKey>,
    kind: FrontendKind,
}

fn rank(kind: FrontendKind) -> u8 {
    match kind {
        // The API server gives each to one Service.
        FrontendKind::ClusterIp => 0,
        // A controller writes it.
        FrontendKind::LoadBalancer => 1,
        // Anybody may name any address.
        FrontendKind::ExternalIp => 2,
        FrontendKind::NodePort | FrontendKind::LoopbackNodePort => 3,
    }
}

/// All frontends that Services name, with those who name them.
#[derive(Clone, Debug, Default)]
pub(super) struct Claims(HashMap<Slot, Vec<Claim>>);

impl Claims {
    /// Adds a Service's claim; the other Services that claim the same are put into `touched`.
    pub(super) fn add(
        &mut self,
        created: Option<i64>,
        key: &Arc<ServicePortKey>,
        frontend: Frontend,
        touched: &mut BTreeSet<ServiceName>,
    ) {
        let (rank, created) = (rank(frontend.kind), created.unwrap_or(i64::MAX));
        let claim = Claim { rank, created, key: Arc::clone(key), kind: frontend.kind };
        let claims = self.0.entry((frontend.address, key.protocol)).or_insert_with(|| Vec::with_capacity(1));
        touched.extend(claims.iter().map(|other| other.key.service.clone()));
        let at = claims.partition_point(|other| *other < claim);
        claims.insert(at, claim);
    }

    /// Takes a Service port's claim away; the other Services that claim the same are put into `touched`.
    pub(super) fn remove(
        &mut self,
        key: &ServicePortKey,
        frontend: Frontend,
        touched: &mut BTreeSet<ServiceName>,
    ) {
        let slot = (frontend.address, key.protocol);
        let Some(claims) = self.0.get_mut(&slot) else { return };
        claims.retain(|claim| *claim.key != *key);
        touched.extend(claims.iter().map(|other| other.key.service.clone()));
        if claims.is_empty() {
            self.0.remove(&slot);
        }
    }

    /// The Service port that has this frontend instead of `key`; `None` if `key` has it.
    pub(super) fn lost_to(&self, key: &ServicePortKey, frontend: Frontend) -> Option<&ServicePortKey> {
        let holder = self.0.get(&(frontend.address, key.protocol))?.first()?.key.as_ref();
        (holder != key).then_some(holder)
    }
}
