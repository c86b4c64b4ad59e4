//! Metrics of syncs, under kube-proxy's names: changes that wait, and how long writing takes.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use traffic_policy_cluster::{
    model::{Index, Indexed, ServiceName, object::EndpointSlice},
    source::{Batch, Change, Update},
};

use super::{
    exposition::Family,
    histogram::Histogram,
    labels::{ip_family, unix},
};

/// Both families are written in one go, so the figures of a sync are the same for both.
const FAMILIES: [bool; 2] = [false, true];

/// Changes of one kind of object in one family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Changes {
    /// Changes that are not written yet.
    pending: u64,
    /// All changes so far.
    total: u64,
}

impl Changes {
    fn add(&mut self, changes: usize) {
        self.pending += changes as u64;
        self.total += changes as u64;
    }
}

/// Durations and times of syncs so far.
#[derive(Debug)]
pub struct Syncs {
    all: Histogram,
    full: Histogram,
    partial: Histogram,
    synced: Option<SystemTime>,
    queued: Option<SystemTime>,
    programming: [Histogram; 2],
    services: [Changes; 2],
    endpoints: [Changes; 2],
    /// Times at which the unwritten changes of each Service's endpoints came to be.
    triggers: [BTreeMap<ServiceName, Vec<SystemTime>>; 2],
    started: SystemTime,
}

impl Syncs {
    /// Makes the metrics. Changes from before `started` are not measured, because the agent did not
    /// exist then.
    pub fn new(started: SystemTime) -> Self {
        let [all, full, partial] = [(); 3].map(|()| Histogram::new(sync_bounds()));
        Self {
            all,
            full,
            partial,
            synced: None,
            queued: None,
            programming: [(); 2].map(|()| Histogram::new(programming_bounds())),
            services: Default::default(),
            endpoints: Default::default(),
            triggers: Default::default(),
            started,
        }
    }

    /// Records changes before they are put into `index`. An object that is already there unchanged
    /// counts as none.
    pub fn arriving(&mut self, batch: &Batch, index: &Index) {
        for update in &batch.0 {
            match update {
                Update::Service(change) => {
                    let (new, gone) = news(change, index);
                    for ipv6 in FAMILIES {
                        let new = new.iter().filter(|service| if ipv6 { service.ipv6 } else { service.ipv4 });
                        self.services[usize::from(ipv6)].add(new.count() + gone);
                    }
                }
                Update::EndpointSlice(change) => self.slices(change, index),
                Update::Node(_)
                | Update::ServiceCidr(_)
                | Update::Leaving(_)
                | Update::Direct(_)
                | Update::Synced => {}
            }
        }
    }

    fn slices(&mut self, change: &Change<EndpointSlice>, index: &Index) {
        let (new, gone) = news(change, index);
        for slice in new {
            self.endpoints[usize::from(slice.ipv6)].add(1);
            // An old annotation on a slice that is new to this agent measures nothing of the
            // agent's.
            if let Some(time) = slice.last_change.0.filter(|time| *time > self.started) {
                let triggers = &mut self.triggers[usize::from(slice.ipv6)];
                triggers.entry(slice.service_name()).or_default().push(time);
            }
        }
        // The family of removed slices is unknown; the annotation dates the last change, not the
        // removal.
        for endpoints in &mut self.endpoints {
            endpoints.add(gone);
        }
    }

    pub fn queued(&mut self, now: SystemTime) {
        self.queued = Some(now);
    }

    /// Records a sync, whether or not it succeeded.
    pub fn tried(&mut self, duration: Duration, full: bool) {
        let seconds = duration.as_secs_f64();
        self.all.observe(seconds);
        if full { &mut self.full } else { &mut self.partial }.observe(seconds);
    }

    /// Records that all waiting changes are in the maps.
    pub fn succeeded(&mut self, now: SystemTime) {
        self.synced = Some(now);
        for changes in self.services.iter_mut().chain(&mut self.endpoints) {
            changes.pending = 0;
        }
        for (histogram, triggers) in self.programming.iter_mut().zip(&mut self.triggers) {
            for time in std::mem::take(triggers).into_values().flatten() {
                // A clock ahead of this node's cannot make the duration negative.
                histogram.observe(now.duration_since(time).unwrap_or_default().as_secs_f64());
            }
        }
    }

    pub fn families(&self) -> Vec<Family> {
        let histogram = |name, help, histograms: [&Histogram; 2]| {
            let mut family = Family::histogram(name, help);
            for (ipv6, histogram) in FAMILIES.into_iter().zip(histograms) {
                family.add_histogram(&[("ip_family", ip_family(ipv6))], histogram);
            }
            family
        };
        let both = |mut family: Family, values: [f64; 2]| {
            for (ipv6, value) in FAMILIES.into_iter().zip(values) {
                family.add(&[("ip_family", ip_family(ipv6))], value);
            }
            family
        };
        let pending = |changes: [Changes; 2]| changes.map(|changes| changes.pending as f64);
        let total = |changes: [Changes; 2]| changes.map(|changes| changes.total as f64);
        let [v4, v6] = &self.programming;
        vec![
            histogram(
                "kubeproxy_sync_proxy_rules_duration_seconds",
                "How long bringing the maps up to date took.",
                [&self.all; 2],
            ),
            histogram(
                "kubeproxy_sync_full_proxy_rules_duration_seconds",
                "How long bringing the maps up to date took when all of them were compared.",
                [&self.full; 2],
            ),
            histogram(
                "kubeproxy_sync_partial_proxy_rules_duration_seconds",
                "How long bringing the maps up to date took when only changed Services were looked at.",
                [&self.partial; 2],
            ),
            both(
                Family::gauge(
                    "kubeproxy_sync_proxy_rules_last_timestamp_seconds",
                    "When the maps were last brought up to date, in seconds since 1970.",
                ),
                [self.synced.map_or(0.0, unix); 2],
            ),
            both(
                Family::gauge(
                    "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds",
                    "When a change last came that had to be written, in seconds since 1970.",
                ),
                [self.queued.map_or(0.0, unix); 2],
            ),
            histogram(
                "kubeproxy_network_programming_duration_seconds",
                "From the change of a pod or Service, as EndpointSlices say, until it was in the maps.",
                [v4, v6],
            ),
            both(
                Family::gauge(
                    "kubeproxy_sync_proxy_rules_endpoint_changes_pending",
                    "Changes of EndpointSlices that are not in the maps yet.",
                ),
                pending(self.endpoints),
            ),
            both(
                Family::counter(
                    "kubeproxy_sync_proxy_rules_endpoint_changes_total",
                    "Changes of EndpointSlices seen.",
                ),
                total(self.endpoints),
            ),
            both(
                Family::gauge(
                    "kubeproxy_sync_proxy_rules_service_changes_pending",
                    "Changes of Services that are not in the maps yet.",
                ),
                pending(self.services),
            ),
            both(
                Family::counter(
                    "kubeproxy_sync_proxy_rules_service_changes_total",
                    "Changes of Services seen.",
                ),
                total(self.services),
            ),
        ]
    }
}

/// Returns the objects that differ from those in the index, and the number of removed ones.
fn news<'a, T: Indexed>(change: &'a Change<T>, index: &Index) -> (Vec<&'a T>, usize) {
    match change {
        Change::Apply(object) => (if object.is_held(index) { vec![] } else { vec![object] }, 0),
        Change::Delete(_) => (Vec::new(), 1),
        Change::Reset { objects, unreadable } => {
            let new: Vec<_> = objects.iter().filter(|object| !object.is_held(index)).collect();
            let kept: std::collections::BTreeSet<_> =
                objects.iter().map(T::name).chain(unreadable.iter().cloned()).collect();
            let gone = T::names(index).into_iter().filter(|name| !kept.contains(name)).count();
            (new, gone)
        }
    }
}

/// Returns kube-proxy's buckets, 1 ms to 16 s:
/// <https://github.com/kubernetes/kubernetes/blob/v1.34.0/pkg/proxy/metrics/metrics.go>
fn sync_bounds() -> Vec<f64> {
    (0..15).map(|power| f64::from(1 << power) / 1000.0).collect()
}

/// Returns kube-proxy's buckets, 250 ms to 5 min, from the same file.
fn programming_bounds() -> Vec<f64> {
    let seconds = (1..60).chain((60..120).step_by(5)).chain((120..=300).step_by(30));
    [0.25, 0.5].into_iter().chain(seconds.map(f64::from)).collect()
}

#[cfg(test)]
mod tests {
    use traffic_policy_cluster::model::object::LastChange;

    use super::*;

    const START: Duration = Duration::from_secs(1_000_000);

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + START + Duration::from_secs(seconds)
    }

    fn slice(name: &str, ports: u16, last_change: u64) -> EndpointSlice {
        EndpointSlice {
            name: ServiceName { namespace: "ns".to_owned(), name: name.to_owned() },
            service: "web".to_owned(),
            ipv6: false,
            ports: vec![traffic_policy_cluster::model::object::SlicePort {
                name: String::new(),
                protocol: traffic_policy_cluster::model::Protocol::Tcp,
                port: ports,
            }],
            endpoints: Vec::new(),
            problems: Vec::new(),
            last_change: LastChange(Some(at(last_change))),
        }
    }

    fn reset(slices: &[EndpointSlice]) -> Batch {
        let change = Change::Reset { objects: slices.to_vec(), unreadable: Vec::new() };
        Batch(vec![Update::EndpointSlice(change)])
    }

    fn apply(syncs: &mut Syncs, index: &mut Index, batch: Batch) {
        syncs.arriving(&batch, index);
        batch.apply(index);
    }

    fn lines(syncs: &Syncs, start: &str) -> Vec<String> {
        let text: String = syncs.families().iter().map(ToString::to_string).collect();
        let lines = text.lines().filter_map(|line| line.strip_prefix(start));
        lines.map(str::to_owned).collect()
    }

    #[test]
    fn buckets_are_kube_proxys() {
        let bounds = sync_bounds();
        assert_eq!((bounds.len(), bounds[0], bounds[14]), (15, 0.001, 16.384));
        let bounds = programming_bounds();
        assert_eq!(bounds.len(), 2 + 59 + 12 + 7);
        assert_eq!(bounds[..4], [0.25, 0.5, 1.0, 2.0]);
        assert_eq!(bounds[59..64], [58.0, 59.0, 60.0, 65.0, 70.0]);
        assert_eq!(bounds[71..], [110.0, 115.0, 120.0, 150.0, 180.0, 210.0, 240.0, 270.0, 300.0][..]);
    }

    /// A list that is read again as a whole holds few changes.
    #[test]
    fn only_what_changed_counts() {
        let (mut syncs, mut index) = (Syncs::new(at(0)), Index::default());
        let (one, two) = (slice("one", 80, 10), slice("two", 80, 20));
        apply(&mut syncs, &mut index, reset(&[one.clone(), two.clone()]));
        assert_eq!(syncs.endpoints[0], Changes { pending: 2, total: 2 });
        assert_eq!(syncs.endpoints[1], Changes::default());
        syncs.succeeded(at(30));
        assert_eq!(syncs.endpoints[0], Changes { pending: 0, total: 2 });
        let name = "kubeproxy_network_programming_duration_seconds";
        assert_eq!(
            lines(&syncs, &format!("{name}_sum")),
            ["{ip_family=\"IPv4\"} 30", "{ip_family=\"IPv6\"} 0"]
        );

        // A touched annotation changes nothing that is written.
        apply(&mut syncs, &mut index, reset(&[slice("one", 80, 40), two]));
        assert_eq!(syncs.endpoints[0].pending, 0);
        apply(&mut syncs, &mut index, reset(&[slice("one", 81, 50)]));
        assert_eq!(syncs.endpoints[0], Changes { pending: 2, total: 4 }, "one changed, one gone");
        syncs.succeeded(at(51));
        assert_eq!(
            lines(&syncs, &format!("{name}_count")),
            ["{ip_family=\"IPv4\"} 3", "{ip_family=\"IPv6\"} 0"]
        );
        assert_eq!(lines(&syncs, &format!("{name}_bucket{{ip_family=\"IPv4\",le=\"1\"}}")), [" 1"]);
    }

    #[test]
    fn what_was_before_the_start_is_not_measured() {
        let (mut syncs, mut index) = (Syncs::new(at(100)), Index::default());
        apply(&mut syncs, &mut index, reset(&[slice("one", 80, 99)]));
        syncs.succeeded(at(101));
        assert_eq!(syncs.programming[0].count(), 0);
        // The clock of the annotation's writer is ahead.
        apply(&mut syncs, &mut index, reset(&[slice("one", 81, 200)]));
        syncs.succeeded(at(102));
        assert_eq!(syncs.programming[0].count(), 1);
        assert!(syncs.programming[0].sum().abs() < f64::EPSILON);
    }

    #[test]
    fn a_failed_sync_leaves_everything_waiting() {
        let (mut syncs, mut index) = (Syncs::new(at(0)), Index::default());
        apply(&mut syncs, &mut index, reset(&[slice("one", 80, 10)]));
        syncs.queued(at(11));
        syncs.tried(Duration::from_millis(3), true);
        assert_eq!(syncs.endpoints[0].pending, 1);
        let last = "kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family=\"IPv6\"}";
        assert_eq!(lines(&syncs, last), [" 0"]);
        syncs.tried(Duration::from_millis(5), false);
        syncs.succeeded(at(12));
        assert_eq!(lines(&syncs, last), [" 1000012"]);
        let queued = "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family=\"IPv4\"}";
        assert_eq!(lines(&syncs, queued), [" 1000011"]);
        let count = |kind: &str| {
            lines(&syncs, &format!("kubeproxy_sync{kind}_proxy_rules_duration_seconds_count"))[1].clone()
        };
        assert_eq!(
            ["", "_full", "_partial"].map(count),
            [2, 1, 1].map(|n| format!("{{ip_family=\"IPv6\"}} {n}"))
        );
    }
}
