//! Service ports for which the maps have no room, or the agent no program: logged once, by name,
//! and shown in `status` as long as the shortage lasts.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use traffic_policy_cluster::{
    model::{Excess, HealthCheck, ServiceName, ServicePortKey},
    source::{EventRecorder, ObjectEvent, Subject},
};
use traffic_policy_dataplane::{Lack, LeftOut};

/// Number of ports that `status` names; the others are only counted.
const NAMED: usize = 100;

/// Service ports that the last write left out.
#[derive(Debug, Default)]
pub(super) struct Shortage {
    left_out: BTreeMap<ServicePortKey, LeftOut>,
    /// Services that are left out as a whole.
    refused: BTreeMap<ServiceName, Excess>,
    /// Services that have been logged.
    reported: BTreeSet<ServiceName>,
}

impl Shortage {
    /// Takes the ports that a write left out, and the refused Services, where they changed. Logs
    /// and posts Events for Services that were not among them before; the model has already warned
    /// of refused ones.
    pub(super) fn update(
        &mut self,
        left_out: Vec<LeftOut>,
        refused: Option<&BTreeMap<ServiceName, Excess>>,
        lines: &mut LogLimit,
        events: &EventRecorder,
    ) {
        if let Some(refused) = refused {
            self.refused.clone_from(refused);
        }
        self.left_out = left_out.into_iter().map(|left_out| (left_out.key.clone(), left_out)).collect();
        let mut services: BTreeMap<&ServiceName, Vec<&LeftOut>> = BTreeMap::new();
        for left_out in self.left_out.values() {
            services.entry(&left_out.key.service).or_default().push(left_out);
        }
        self.reported.retain(|service| services.contains_key(service));
        for (service, ports) in services {
            if self.reported.contains(service) {
                continue;
            }
            self.reported.insert(service.clone());
            let message = message(service, &ports);
            if lines.take() {
                tracing::warn!("{message}");
            }
            let subject = Subject::Service(service.clone());
            let reason = if lacks_programs(&ports) { "NoPrograms" } else { "NoRoom" };
            events.post(ObjectEvent::warning(subject, reason, "Program", message));
        }
        lines.close();
    }

    /// Returns the ports for which a later write may find room.
    pub(super) fn keys(&self) -> impl Iterator<Item = &ServicePortKey> {
        self.left_out.keys()
    }

    /// Whether there is room for all but Maglev tables: packets that name their endpoint are opened
    /// without one.
    pub(super) fn is_of_tables_alone(&self) -> bool {
        self.left_out.values().all(lacks_table)
    }

    /// Whether there is a port without its Maglev table, whose endpoints are chosen at random.
    pub(super) fn is_of_tables(&self) -> bool {
        self.left_out.values().any(lacks_table)
    }

    /// Whether [`Self::hold_back`] changes anything.
    pub(super) fn holds_back(&self) -> bool {
        !self.left_out.is_empty()
    }

    /// Returns the number of ports that are not in the maps as they should be.
    pub(super) fn ports(&self) -> usize {
        self.left_out.len() + self.refused.values().map(|excess| excess.ports).sum::<usize>()
    }

    /// Returns one human-readable line for each port, and for each Service that is left out as a
    /// whole.
    pub(super) fn lines(&self) -> Vec<String> {
        let line = |left_out: &LeftOut| format!("{}: {}", named(left_out), left_out.lack);
        let whole = |(service, excess): (&ServiceName, &Excess)| format!("{service} (all of it): {excess}");
        let all = self.refused.iter().map(whole).chain(self.left_out.values().map(line));
        let mut lines: Vec<_> = all.take(NAMED).collect();
        if let more @ 1.. = (self.refused.len() + self.left_out.len()).saturating_sub(NAMED) {
            lines.push(format!("and {more} more"));
        }
        lines
    }

    /// Reduces health checks to what the maps hold: a port that was left out has no endpoint here.
    pub(super) fn hold_back(&self, health: &mut BTreeMap<ServiceName, HealthCheck>) {
        for left_out in self.left_out.values() {
            if let Some(check) = health.get_mut(&left_out.key.service) {
                check.local_endpoints = check.local_endpoints.min(left_out.local_endpoints);
            }
        }
    }
}

fn lacks_table(left_out: &LeftOut) -> bool {
    matches!(left_out.lack, Lack::Tables | Lack::TableSlots { .. })
}

fn named(left_out: &LeftOut) -> String {
    format!("{} ({})", left_out.key, if left_out.key.ipv6 { "IPv6" } else { "IPv4" })
}

/// Whether the first of these ports, whose lack is told, lacks a program.
fn lacks_programs(ports: &[&LeftOut]) -> bool {
    ports.first().is_some_and(|port| port.lack == Lack::Programs)
}

fn message(service: &ServiceName, ports: &[&LeftOut]) -> String {
    let names: Vec<_> = ports.iter().take(3).map(|port| named(port)).collect();
    let more = if ports.len() > names.len() {
        format!(" and {} more of its ports", ports.len() - names.len())
    } else {
        String::new()
    };
    let why = ports.first().map(|port| port.lack.to_string()).unwrap_or_default();
    let lack = if lacks_programs(ports) { "there are no programs" } else { "the maps have no room" };
    format!(
        "Service {service}: {lack} for {}{more}: {why}. What they hold of it stays; it is tried again.",
        names.join(", ")
    )
}

/// A limit for log lines about input of tenants: a burst, and a number per interval after it.
#[derive(Debug)]
pub(super) struct LogLimit {
    left: u32,
    refilled: Instant,
    suppressed: usize,
}

impl LogLimit {
    const BURST: u32 = 50;
    const REFILL: Duration = Duration::from_secs(2);

    pub(super) fn new() -> Self {
        Self { left: Self::BURST, refilled: Instant::now(), suppressed: 0 }
    }

    /// Whether a line may be written.
    pub(super) fn take(&mut self) -> bool {
        let more = self.refilled.elapsed().as_secs() / Self::REFILL.as_secs();
        if more > 0 {
            self.left = Self::BURST.min(self.left.saturating_add(u32::try_from(more).unwrap_or(Self::BURST)));
            self.refilled = Instant::now();
        }
        if self.left == 0 {
            self.suppressed += 1;
            return false;
        }
        self.left -= 1;
        true
    }

    /// Logs how many lines were suppressed since the last call.
    pub(super) fn close(&mut self) {
        let suppressed = std::mem::take(&mut self.suppressed);
        if suppressed > 0 {
            tracing::warn!(
                "{suppressed} more warnings about Services are not logged: `status` and the metrics count them"
            );
        }
    }
}
