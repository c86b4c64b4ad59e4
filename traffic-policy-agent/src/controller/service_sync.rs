//! Sync of Services: objects of the source become map content, then health-check ports, metrics,
//! Events.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use ipnet::IpNet;
use tokio::time::Instant;
use traffic_policy_cluster::{
    model::{
        Algorithm, Changes, DispatchChoice, Excess, Forwarding, HealthCheck, Index, NodeInput, ServiceName,
        Silent, Warning, Ways,
    },
    source::{Batch, EventRecorder, ObjectEvent, Source, Subject},
};
use traffic_policy_dataplane::{
    CgroupPrograms, DevicePrograms, Figures, FlowSweeps, PacketPath,
    node::{self, Address, socket_ender::SocketEnder},
    release_memory,
};

use super::{
    NodePortAddresses, Settings,
    drains::Drains,
    health_ports::HealthPorts,
    left_out::{LogLimit, Shortage},
    sockets,
};
use crate::{
    health::{EndpointLeftOut, ProxyHealth, ServiceHealth},
    metrics::{Metrics, Observed, PortCounts},
    notice::{self, Reporter},
};

/// The desired state, and how far the maps follow it.
pub(super) struct ServiceSync {
    node_name: String,
    node_port_addresses: NodePortAddresses,
    service_cidrs: BTreeSet<IpNet>,
    forwarding: Forwarding,
    dispatch: DispatchChoice,
    ways: Arc<Ways>,
    choice: String,
    /// Whether no flow is to begin as a direct one yet.
    hold_direct: bool,
    /// The same as of the last write.
    held_direct: bool,
    algorithm: Algorithm,
    health_ports: HealthPorts,
    /// Delay before a failed write is tried again.
    retry: Duration,
    index: Index,
    health: ProxyHealth,
    /// The place of `--notice node`, if it is given.
    news: Option<Reporter>,
    metrics: Metrics,
    service_health: ServiceHealth,
    /// Health checks as of the last write that succeeded.
    checks: BTreeMap<ServiceName, HealthCheck>,
    /// Listening addresses of health-check ports.
    health_addresses: BTreeSet<IpAddr>,
    /// Whether addresses, or all checks, have changed since ports were last opened and closed.
    ports_changed: bool,
    /// Whether a note has been logged.
    noted: bool,
    /// A warning that has been logged and does not come from the model.
    concern: Option<String>,
    lines: LogLimit,
    /// Changes whose write failed because the write as a whole failed.
    failed: Changes,
    /// Service ports for which there is no room.
    shortage: Shortage,
    synced_once: bool,
    drains: Drains,
    /// Other nodes that are about to go, as last logged.
    leaving: BTreeSet<String>,
    socket_ender: Option<SocketEnder>,
    ending: sockets::EndingSockets,
    /// This node's addresses as of the last write.
    local: BTreeSet<IpAddr>,
}

impl ServiceSync {
    pub(super) fn new(settings: &Settings, retry: Duration, health: ProxyHealth, metrics: Metrics) -> Self {
        Self {
            node_name: settings.node_name.clone(),
            node_port_addresses: settings.node_port_addresses.clone(),
            service_cidrs: settings.service_cidrs.clone(),
            forwarding: settings.forwarding,
            dispatch: settings.dispatch,
            ways: Arc::default(),
            choice: settings.choice.clone(),
            hold_direct: false,
            held_direct: false,
            algorithm: settings.algorithm,
            health_ports: HealthPorts::of(settings),
            retry,
            index: Index::default(),
            service_health: ServiceHealth::new(settings.node_name.clone(), health.clone()),
            checks: BTreeMap::new(),
            health_addresses: BTreeSet::new(),
            health,
            news: notice::of_node(&settings.notices, &settings.board),
            metrics,
            ports_changed: true,
            noted: false,
            concern: None,
            lines: LogLimit::new(),
            failed: Changes::default(),
            shortage: Shortage::default(),
            synced_once: false,
            drains: Drains::default(),
            leaving: BTreeSet::new(),
            socket_ender: settings.socket_ender.clone(),
            ending: sockets::EndingSockets::default(),
            local: BTreeSet::new(),
        }
    }

    /// Sets the addresses on which node ports are reached from the next write on. Returns whether
    /// they differ from the previous ones.
    pub(super) fn set_node_port_addresses(&mut self, addresses: &NodePortAddresses) -> bool {
        let differ = self.node_port_addresses != *addresses;
        self.node_port_addresses.clone_from(addresses);
        differ
    }

    /// Returns all objects, and the desired state.
    pub(super) fn index(&self) -> &Index {
        &self.index
    }

    /// Keeps the numbers of nodes that an earlier agent has given.
    pub(super) fn keep_node_numbers(&mut self, numbers: Vec<(u16, String)>) {
        self.index.keep_node_numbers(numbers);
    }

    /// Sets whether no flow is to begin as a direct one, from the next write on.
    pub(super) fn hold_direct(&mut self, hold: bool) {
        self.hold_direct = hold;
    }

    /// Sets the ways to other nodes from the next write on.
    pub(super) fn set_ways(&mut self, ways: Arc<Ways>) {
        self.ways = ways;
    }

    /// Has packets of Services that have changed lately name their endpoints, see
    /// [`Index::follow_recent`].
    pub(super) fn follow_recent(&mut self, known: BTreeSet<ServiceName>) {
        self.index.follow_recent(known);
    }

    /// Notes the time that has passed, see [`Index::age_services`].
    pub(super) fn age(&mut self) -> bool {
        self.index.age_services()
    }

    /// Whether flows may begin as direct ones, but the maps do not say so yet.
    pub(super) fn holds_in_vain(&self) -> bool {
        self.held_direct && !self.hold_direct
    }

    /// Sets whose endpoints take no new flows. Returns whether the maps are to be written.
    pub(super) fn leave_out(&mut self, silent: Silent) -> bool {
        self.index.leave_out(silent) && self.index.is_synced()
    }

    /// Whether all objects have been listed once.
    pub(super) fn has_objects(&self) -> bool {
        self.index.is_synced()
    }

    /// Whether the maps were made equal to the desired state at least once.
    pub(super) fn synced_once(&self) -> bool {
        self.synced_once
    }

    /// Whether health-check ports could not be listened on.
    pub(super) fn has_health_failures(&self) -> bool {
        self.service_health.has_failures()
    }

    /// Returns the addresses of this node's Node object.
    pub(super) fn primary(&self) -> Vec<IpAddr> {
        self.index.node_addresses(&self.node_name).to_vec()
    }

    /// Puts a batch into the index. Returns whether anything changed that may have to be written.
    pub(super) fn apply_batch(&mut self, batch: Batch) -> bool {
        self.metrics.arriving(&batch, &self.index);
        batch.apply(&mut self.index)
    }

    /// Queries the source whether it may miss Services. Returns whether that changed, so that the
    /// maps must be written.
    pub(super) fn look_at(&mut self, source: &Source) -> bool {
        self.index.set_blind(source.status().get().is_blind()) && self.index.is_synced()
    }

    /// Whether Service ports were left out for want of room, which may be available by now.
    pub(super) fn lacks_room(&self) -> bool {
        self.shortage.keys().next().is_some()
    }

    /// Whether packets for endpoints of this node can be opened for all Service ports.
    pub(super) fn opens_all(&self) -> bool {
        self.shortage.is_of_tables_alone()
    }

    /// Whether a Service port has no Maglev table, although it asks for one.
    pub(super) fn lacks_tables(&self) -> bool {
        self.shortage.is_of_tables()
    }

    /// Brings the maps up to date, then the health-check ports; `beat` is called while that takes
    /// long. Returns whether that failed.
    pub(super) async fn write(
        &mut self,
        path: &mut impl PacketPath,
        addresses: &[Address],
        source: &Source,
        beat: &(dyn Fn() + Sync),
    ) -> bool {
        if !self.index.is_synced() {
            return false;
        }
        let start = Instant::now();
        self.look_at(source);
        let primary = self.primary();
        sockets::describe_node(path, &primary, self.index.pod_cidrs(&self.node_name));
        let chosen = &self.node_port_addresses;
        let listen = chosen.listen(addresses, &primary);
        self.ports_changed |= listen != self.health_addresses;
        self.health_addresses = listen;
        let input = NodeInput {
            node_name: self.node_name.clone(),
            node_port_addresses: chosen.resolve(addresses, &primary),
            loopback_ipv4: chosen.loopback(false),
            loopback_ipv6: chosen.loopback(true),
            service_cidrs: self.service_cidrs.clone(),
            forwarding: self.forwarding,
            dispatch: self.dispatch,
            ways: Arc::clone(&self.ways),
            choice: self.choice.clone(),
            hold_direct: self.hold_direct,
            health_ports: self.health_ports.look(),
            algorithm: self.algorithm,
            limits: path.limits(),
            ipv4: true,
            ipv6: true,
        };
        self.held_direct = self.hold_direct;
        let mut changes = self.index.update_with(&input, beat);
        let numbered = path.number_nodes(self.index.take_new_node_numbers());
        changes.ports.extend(self.shortage.keys().cloned());
        if *self.index.leaving_nodes() != self.leaving {
            self.leaving.clone_from(self.index.leaving_nodes());
            match &*self.leaving.iter().map(String::as_str).collect::<Vec<_>>().join(", ") {
                "" => tracing::info!("no other node is about to go"),
                names => tracing::info!("other nodes that are about to go: {names}"),
            }
        }
        let desired = self.index.desired();
        let concern =
            chosen.concern(&self.node_name, addresses.iter().map(|address| address.address), &primary);
        if concern != self.concern {
            changes.warned.extend(concern.iter().map(|text| Warning { service: None, text: text.clone() }));
            self.concern = concern;
        }
        let warned = std::mem::take(&mut changes.warned);
        report_warnings(&warned, &mut self.noted, &desired.refused, &mut self.lines, source);
        changes.add_unwritten(std::mem::take(&mut self.failed));
        let local = node::local(addresses);
        changes.ports.extend(desired.ports_at(self.local.symmetric_difference(&local)));
        let full = path.compares_all();
        let result = numbered.and_then(|()| path.sync(desired, &changes, &local));
        match &result {
            Ok(_) => self.metrics.synced(start.elapsed(), full),
            Err(_) => self.metrics.failed(start.elapsed(), full),
        }
        match result {
            Ok(written) => {
                self.local = local;
                self.health.set_endpoints_left_out(endpoints_left_out(&self.index));
                self.end_sockets(path);
                let held_back = self.shortage.holds_back() || !written.left_out.is_empty();
                let refused = Some(&desired.refused).filter(|_| changes.refused);
                self.shortage.update(written.left_out, refused, &mut self.lines, &source.events());
                self.health.left_out(self.shortage.lines());
                self.health.set_refused(written.refused);
                if held_back {
                    self.checks.clone_from(&desired.health);
                    self.shortage.hold_back(&mut self.checks);
                    self.ports_changed = true;
                } else {
                    for name in &changes.health {
                        match desired.health.get(name) {
                            Some(check) => self.checks.insert(name.clone(), check.clone()),
                            None => self.checks.remove(name),
                        };
                    }
                }
                if !self.synced_once {
                    tracing::info!(services = desired.ports.len(), writes = written.elements, "first sync");
                } else if written.elements > 0 {
                    tracing::info!(changed = changes.ports.len(), writes = written.elements, "synced");
                }
                // While another layout version's programs serve, nothing is attached, and every
                // device would be forgotten.
                if !self.synced_once
                    && !path.is_replacing()
                    && let Err(error) = path.forget_others()
                {
                    // The devices stay as they are; the next start tries again.
                    tracing::warn!("devices of an earlier run were not forgotten: {error:#}");
                }
                let first = !std::mem::replace(&mut self.synced_once, true);
                self.health.set_node_eligible(desired.node_eligible);
                if let Some(news) = &self.news {
                    news.say(self.index.leaving_by_node(&self.node_name).map(notice::leaving));
                }
                if std::mem::take(&mut self.ports_changed) {
                    self.update_health(source, None).await;
                } else if !changes.health.is_empty() || self.has_health_failures() {
                    self.update_health(source, Some(&changes.health)).await;
                }
                // Not before the health-check ports: a load balancer that probes one must not find
                // it closed on a node whose /healthz says 200.
                self.health.synced();
                if first {
                    self.observe(path, &source.events());
                    release_memory();
                }
                false
            }
            Err(error) => {
                tracing::error!(
                    "writing the maps failed, trying again in {} s: {error:#}",
                    self.retry.as_secs()
                );
                self.failed = changes;
                self.health.explain(format!("{error:#}"));
                self.health.failed();
                true
            }
        }
    }

    /// Returns the addresses of endpoints on other nodes, each once.
    pub(super) fn remote_endpoints(&self) -> BTreeSet<IpAddr> {
        let ports = self.index.desired().ports.values();
        let endpoints = ports.flat_map(|port| port.cluster.iter().chain(&port.local));
        endpoints.filter(|endpoint| endpoint.remote).map(|endpoint| endpoint.address.ip()).collect()
    }

    /// Ends UDP sockets of removed endpoints: see [`sockets::end_sockets`].
    pub(super) fn end_sockets(&self, path: &(impl CgroupPrograms + FlowSweeps)) {
        if let Some(ender) = &self.socket_ender {
            sockets::end_sockets(path, ender, &self.ending);
        }
    }

    /// Hands the values to scrapes: after each sweep, which is often enough for all of them and
    /// known to end soon.
    pub(super) fn observe(&mut self, path: &(impl DevicePrograms + Figures), events: &EventRecorder) {
        let usage = path.usage();
        self.drains.update(&usage.draining, events);
        let desired = self.index.desired();
        let attached = path.attached();
        self.metrics.observed(Observed {
            attached: attached.map(|(interface, mode)| (interface.name.clone(), mode)).collect(),
            usage,
            ports: PortCounts::of(desired),
            node_eligible: desired.node_eligible,
            warnings: self.index.warnings().map(|(name, count)| (name.clone(), count)).collect(),
            no_room: self.shortage.ports(),
            failed: self.failed.ports.len(),
        });
    }

    /// Opens and closes health-check ports once the maps hold what they promise: for these Services
    /// and for those whose ports failed; for all if `None`.
    pub(super) async fn update_health(&mut self, source: &Source, services: Option<&BTreeSet<ServiceName>>) {
        let (health, checks, addresses) = (&mut self.service_health, &self.checks, &self.health_addresses);
        let failures = match services {
            Some(services) => health.update_those(checks, addresses, services).await,
            None => health.update(checks, addresses).await,
        };
        for failure in failures {
            source.events().post(ObjectEvent::warning(
                Subject::Service(failure.service.clone()),
                "FailedToStartServiceHealthcheck",
                "Listen",
                failure.message(&self.node_name),
            ));
        }
    }
}

fn endpoints_left_out(index: &Index) -> Vec<EndpointLeftOut> {
    let of_ports = index.left_out_endpoints();
    let endpoints = of_ports.iter().flat_map(|(key, endpoints)| endpoints.iter().map(move |one| (key, one)));
    endpoints
        .map(|(key, (address, node))| EndpointLeftOut {
            namespace: key.service.namespace.clone(),
            name: key.service.name.clone(),
            port: key.port.clone(),
            protocol: key.protocol.to_string(),
            address: *address,
            node: node.clone(),
        })
        .collect()
}

/// Logs new warnings, and posts an Event where a Service is concerned. Notes, which every node has
/// about the same Services at every start, share one line of the log and cause no Event.
fn report_warnings(
    warnings: &BTreeSet<Warning>,
    noted: &mut bool,
    refused: &BTreeMap<ServiceName, Excess>,
    lines: &mut LogLimit,
    source: &Source,
) {
    if let Some(note) = warnings.iter().find(|warning| warning.is_note())
        && !std::mem::replace(noted, true)
    {
        tracing::info!("{note} There may be more such Services: `services` names each");
    }
    for warning in warnings.iter().filter(|warning| !warning.is_note()) {
        if warning.service.is_none() || lines.take() {
            tracing::warn!("{warning}");
        }
        if let Some(service) = &warning.service {
            let subject = Subject::Service(service.clone());
            let message = warning.text.clone();
            let excess = refused.get(service).map(|excess| excess.sentence(service));
            let reason = if excess.is_some_and(|text| text == message) { "NoRoom" } else { "Misconfigured" };
            source.events().post(ObjectEvent::warning(subject, reason, "Program", message));
        }
    }
    lines.close();
}
