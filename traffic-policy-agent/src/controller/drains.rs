//! Drains as Events of their Services: those that began on this node, and those that stopped.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use traffic_policy_cluster::{
    model::{ServiceName, ServicePortKey},
    source::{EventRecorder, ObjectEvent, Subject},
};

/// Services for which this node still forwards new connections, although they are Local and have no
/// endpoint here.
#[derive(Debug, Default)]
pub(super) struct Drains {
    until: BTreeMap<ServiceName, SystemTime>,
}

impl Drains {
    /// Posts the changes since the last call. `draining` holds Service ports, with the end of their
    /// drain.
    pub(super) fn update(&mut self, draining: &[(ServicePortKey, SystemTime)], events: &EventRecorder) {
        for event in self.changes(draining, SystemTime::now()) {
            events.post(event);
        }
    }

    fn changes(&mut self, draining: &[(ServicePortKey, SystemTime)], now: SystemTime) -> Vec<ObjectEvent> {
        let mut until: BTreeMap<ServiceName, SystemTime> = BTreeMap::new();
        for (key, end) in draining {
            let last = until.entry(key.service.clone()).or_insert(*end);
            *last = (*last).max(*end);
        }
        let began = until.iter().filter(|(service, _)| !self.until.contains_key(*service));
        let began = began.map(|(service, end)| {
            let left = end.duration_since(now).unwrap_or(Duration::ZERO).as_secs_f64().ceil();
            let message = format!(
                "policy Local, and no endpoint on this node: new connections are forwarded for {left} s more, so that load balancers \
                 can notice by the health port, which says 503"
            );
            ObjectEvent::normal(Subject::Service(service.clone()), "DrainStarted", "Drain", message)
        });
        let ended = self.until.keys().filter(|service| !until.contains_key(*service));
        let ended = ended.map(|service| {
            let message = "the drain of this node is over: it forwards no new connections any more, and drops them unless it has an \
                           endpoint by now or the policy is Cluster again"
                .to_owned();
            ObjectEvent::normal(Subject::Service(service.clone()), "DrainEnded", "Drain", message)
        });
        let events = began.chain(ended).collect();
        self.until = until;
        events
    }
}

#[cfg(test)]
mod tests {
    use traffic_policy_cluster::model::Protocol;

    use super::*;

    #[test]
    fn each_drain_is_told_once_at_both_ends() {
        let key = |service: &str, port: &str| ServicePortKey {
            service: ServiceName { namespace: "shop".to_owned(), name: service.to_owned() },
            port: port.to_owned(),
            protocol: Protocol::Tcp,
            ipv6: false,
        };
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
        let end = now + Duration::from_secs(30);
        let mut drains = Drains::default();
        let said = |drains: &mut Drains, draining: &[(ServicePortKey, SystemTime)]| {
            let events = drains.changes(draining, now);
            let line = |event: ObjectEvent| {
                let Subject::Service(service) = event.subject else { panic!("of the Node") };
                assert!(!event.is_warning);
                (service.name, event.reason, event.message.contains("for 30 s more"))
            };
            events.into_iter().map(line).collect::<Vec<_>>()
        };
        assert_eq!(said(&mut drains, &[]), []);
        let both = [(key("web", "http"), end), (key("web", "https"), end), (key("api", ""), end)];
        let started = |name: &str| (name.to_owned(), "DrainStarted".to_owned(), true);
        assert_eq!(said(&mut drains, &both), [started("api"), started("web")]);
        assert_eq!(said(&mut drains, &both), []);
        assert_eq!(said(&mut drains, &both[1..2]), [("api".to_owned(), "DrainEnded".to_owned(), false)]);
        assert_eq!(said(&mut drains, &[]), [("web".to_owned(), "DrainEnded".to_owned(), false)]);
    }
}
