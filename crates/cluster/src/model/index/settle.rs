//! The step that puts one Service into the desired state alongside the others.

use std::{collections::BTreeSet, sync::Arc};

use super::{
    super::{
        Frontend, FrontendKind, ServiceName, ServicePortKey, Warning, conflicts::Holder, health_ports,
        service_port::Wanted,
    },
    Changes, Index,
};

/// The number of conflicts of one Service that are reported individually.
const CONFLICTS: usize = 50;

impl Index {
    /// Puts one Service into the desired state: what it wants, except frontends that others hold.
    pub(super) fn settle(&mut self, name: &ServiceName, changes: &mut Changes) {
        let nothing = Wanted::default();
        let wanted = self.wanted.get(name).unwrap_or(&nothing);
        let mut warnings = wanted.warnings.clone();

        let mut gone: BTreeSet<_> = self.desired.ports_of(name).map(|(key, _)| key.clone()).collect();
        let mut conflicts = 0;
        for (key, port) in &wanted.ports {
            let mut lost = BTreeSet::new();
            for frontend in &port.frontends {
                let other_proxy = self.foreign.owner(frontend.address.ip());
                let holder = match (other_proxy, self.claims.lost_to(key, *frontend)) {
                    (Some(owner), _) => format!("Service {owner} of another proxy has that address"),
                    (None, Some(Holder::Named(holder))) => format!("Service {holder} has it"),
                    (None, Some(Holder::OneOfMany)) => {
                        "one of many Services that come before it has it".to_owned()
                    }
                    (None, None) => continue,
                };
                lost.insert(*frontend);
                conflicts += 1;
                if conflicts <= CONFLICTS {
                    warnings.insert(conflict(key, *frontend, &holder));
                }
            }
            let mut port = Arc::clone(port);
            if !lost.is_empty() {
                Arc::make_mut(&mut port).frontends.retain(|frontend| !lost.contains(frontend));
            }
            gone.remove(key.as_ref());
            if self.desired.ports.get(key.as_ref()) != Some(&port) {
                self.desired.ports.insert(key.as_ref().clone(), port);
                changes.ports.insert(key.as_ref().clone());
            }
        }
        for key in gone {
            self.desired.ports.remove(&key);
            changes.ports.insert(key);
        }
        if let Some(more @ 1..) = conflicts.checked_sub(CONFLICTS) {
            warnings.insert(format!("Service {name} does not get {more} more frontends, which others have."));
        }
        if self.desired.refused.get(name) != wanted.refused.as_ref() {
            changes.refused = true;
            match &wanted.refused {
                Some(excess) => self.desired.refused.insert(name.clone(), excess.clone()),
                None => self.desired.refused.remove(name),
            };
        }

        let denied = wanted.annotated.and_then(|port| Some((port, self.health_port_refusal(name, port)?)));
        warnings.extend(denied.iter().map(|(port, why)| health_ports::sentence(name, *port, why)));
        let health = wanted.health.as_ref().filter(|_| denied.is_none());
        if self.desired.health.get(name) != health {
            changes.health.insert(name.clone());
            match health {
                Some(health) => self.desired.health.insert(name.clone(), health.clone()),
                None => self.desired.health.remove(name),
            };
        }

        let old = self.warnings.remove(name).unwrap_or_default();
        if old != warnings {
            changes.warnings = true;
            let about = |text: &String| Warning { service: Some(name.clone()), text: text.clone() };
            changes.warned.extend(warnings.difference(&old).map(about));
            for text in &old {
                self.desired.warnings.remove(&about(text));
            }
            self.desired.warnings.extend(warnings.iter().map(about));
        }
        if !warnings.is_empty() {
            self.warnings.insert(name.clone(), warnings);
        }
    }
}

fn conflict(key: &ServicePortKey, frontend: Frontend, holder: &str) -> String {
    let protocol = key.protocol;
    let what = match frontend.kind {
        FrontendKind::NodePort | FrontendKind::LoopbackNodePort | FrontendKind::OpenedNodePort => {
            format!("node port {}/{protocol}", frontend.address.port())
        }
        FrontendKind::ClusterIp => format!("cluster IP {}/{protocol}", frontend.address),
        FrontendKind::LoadBalancer => format!("load balancer address {}/{protocol}", frontend.address),
        FrontendKind::ExternalIp => format!("external IP {}/{protocol}", frontend.address),
    };
    format!("Service {} does not get {what} for its port {:?}: {holder}.", key.service, key.port)
}
