//! The packets of each Service by outcome: those that the packet path has added up, and those of
//! existing flows.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

use anyhow::Result;
use traffic_policy_cluster::model::ServicePortKey;
use traffic_policy_ebpf::{
    abi::{self, Address, Address4, Address6, FlowKey, ServiceCountKey, kind},
    outcome::Outcome,
};

use super::{pinned::Pinned, services::service_names};

/// The packets with one outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    pub packets: u64,
    /// The bytes of IP packets.
    pub bytes: u64,
}

impl Count {
    fn add(&mut self, packets: u64, bytes: u64) {
        self.packets += packets;
        self.bytes += bytes;
    }
}

/// The packets and flows of all Services, by the index of the Service port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub packets: BTreeMap<(u32, Outcome), Count>,
    /// The number of existing flows.
    pub flows: BTreeMap<u32, u64>,
}

/// One line of the counts, for metrics. A packet whose flow is removed at the moment of reading may
/// be missing or counted twice; the next reading is correct.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceCount {
    pub key: ServicePortKey,
    pub outcome: Outcome,
    pub packets: u64,
    /// The bytes of IP packets.
    pub bytes: u64,
}

/// Returns the outcome of an entry's packets.
fn outcome<A: Address>(flow: &abi::Flow<A>) -> Option<Outcome> {
    Some(match flow.kind {
        kind::FORWARD => Outcome::Forwarded,
        kind::DIRECT if flow.is_to_owner() => Outcome::ForwardedToOwner,
        kind::DIRECT => Outcome::ForwardedDirect,
        kind::REPLY => Outcome::Replied,
        kind::DELIVER => Outcome::Delivered,
        kind::REPLY_LOCAL => Outcome::RepliedLocal,
        _ => return None,
    })
}

/// Returns a function that reads the counts of the packet path pinned below `root`. They never fall
/// as long as a Service exists, even if a flow is removed at the moment of reading.
///
/// The function fails if the maps cannot be read.
pub fn service_count_reader(root: PathBuf) -> impl Fn() -> Result<Vec<ServiceCount>> + Send + Sync + 'static {
    let highest: Mutex<Highest> = Mutex::default();
    move || {
        let counts = ServiceCount::all(&Pinned::open(&root)?)?;
        Ok(steady(&mut highest.lock().unwrap_or_else(PoisonError::into_inner), counts))
    }
}

type Highest = BTreeMap<(ServicePortKey, Outcome), Count>;

fn steady(highest: &mut Highest, mut counts: Vec<ServiceCount>) -> Vec<ServiceCount> {
    let mut next = Highest::new();
    for count in &mut counts {
        let key = (count.key.clone(), count.outcome);
        if let Some(before) = highest.get(&key) {
            count.packets = count.packets.max(before.packets);
            count.bytes = count.bytes.max(before.bytes);
        }
        next.insert(key, Count { packets: count.packets, bytes: count.bytes });
    }
    // Services that no longer exist are forgotten.
    *highest = next;
    counts
}

impl Counts {
    /// Reads the packets by Service and outcome.
    pub fn read(pinned: &Pinned) -> Result<Self> {
        let mut counts = Self::default();
        pinned.map("tp_svc_counts")?.each(|key: ServiceCountKey, count: abi::ServiceCount| {
            if let Some(outcome) = Outcome::numbered(key.outcome) {
                counts.packets.entry((key.service, outcome)).or_default().add(count.packets, count.bytes);
            }
        })?;
        pinned.map("tp_flows4")?.each(|_: FlowKey<Address4>, flow| counts.add::<Address4>(&flow))?;
        pinned.map("tp_flows6")?.each(|_: FlowKey<Address6>, flow| counts.add::<Address6>(&flow))?;
        Ok(counts)
    }

    fn add<A: Address>(&mut self, flow: &abi::Flow<A>) {
        let Some(outcome) = outcome(flow) else { return };
        let (packets, bytes) = flow.traffic();
        self.packets.entry((flow.service, outcome)).or_default().add(packets, bytes);
        if matches!(flow.kind, kind::FORWARD | kind::DELIVER | kind::DIRECT) {
            *self.flows.entry(flow.service).or_default() += 1;
        }
    }
}

impl ServiceCount {
    /// Returns the counts by the names of Services, without flows of Services that no longer exist.
    pub fn all(pinned: &Pinned) -> Result<Vec<Self>> {
        let names = service_names(pinned)?;
        let counts = Counts::read(pinned)?;
        Ok(counts
            .packets
            .into_iter()
            .filter_map(|((service, outcome), Count { packets, bytes })| {
                let key = names.get(&service)?.clone();
                Some(Self { key, outcome, packets, bytes })
            })
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use traffic_policy_cluster::model::{Protocol, ServiceName};
    use traffic_policy_ebpf::abi::{REPLY_THROUGH_FRONT, TO_OWNER};

    use super::*;

    #[test]
    fn what_is_sent_on_for_another_node_has_its_own_count() {
        let of = |kind, address_delta| {
            outcome(&abi::Flow::<Address4> { kind, address_delta, ..Default::default() })
        };
        let back = REPLY_THROUGH_FRONT as u16;
        for (delta, expected) in [
            (0, Outcome::ForwardedDirect),
            (back, Outcome::ForwardedDirect),
            (TO_OWNER, Outcome::ForwardedToOwner),
            (TO_OWNER | back, Outcome::ForwardedToOwner),
        ] {
            assert_eq!(of(kind::DIRECT, delta), Some(expected));
        }
        assert_eq!(of(kind::FORWARD, TO_OWNER), Some(Outcome::Forwarded), "it is a difference of sums there");
    }

    #[test]
    fn never_fall_while_the_service_lives() {
        let count = |packets| {
            let key = ServicePortKey {
                service: ServiceName { namespace: "shop".to_owned(), name: "web".to_owned() },
                port: "http".to_owned(),
                protocol: Protocol::Tcp,
                ipv6: false,
            };
            ServiceCount { key, outcome: Outcome::Forwarded, packets, bytes: packets * 100 }
        };
        let mut highest = Highest::new();
        assert_eq!(steady(&mut highest, vec![count(7)]), [count(7)]);
        assert_eq!(steady(&mut highest, vec![count(5)]), [count(7)], "a flow was counted twice before");
        assert_eq!(steady(&mut highest, vec![count(9)]), [count(9)]);
        assert_eq!(steady(&mut highest, Vec::new()), []);
        assert_eq!(steady(&mut highest, vec![count(1)]), [count(1)], "another Service of the same name");
    }
}
