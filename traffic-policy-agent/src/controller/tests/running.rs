//! A controller that runs on a [`Fake`] and a folder of manifests.

use std::{collections::BTreeSet, net::SocketAddr, path::Path};

use tempfile::TempDir;
use tokio::{
    sync::mpsc,
    task::AbortHandle,
    time::{sleep, timeout},
};
use traffic_policy_cluster::{
    model::{Algorithm, DispatchChoice, Forwarding},
    source::Manifests,
};
use traffic_policy_dataplane::Config;

use super::{
    super::*,
    fake::{Calls, Fake},
};
use crate::in_effect::InEffect;

/// A controller that runs on a folder of manifests until this is dropped.
pub(super) struct Running {
    pub folder: TempDir,
    pub fake: Fake,
    pub health: ProxyHealth,
    pub metrics: Metrics,
    /// Sender of settings that the controller takes over while it runs.
    pub reloads: mpsc::Sender<Reload>,
    task: AbortHandle,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Returns settings for a node that follows these manifests.
pub(super) fn settings(manifests: Manifests) -> Settings {
    Settings {
        node_name: manifests.node_name.clone(),
        devices: Vec::new(),
        origin: Origin::Manifests(manifests),
        node_port_addresses: "all".parse().unwrap(),
        service_cidrs: BTreeSet::new(),
        forwarding: Forwarding::Snat,
        dispatch: DispatchChoice::Auto,
        choice: String::new(),
        opening: None,
        algorithm: Algorithm::default(),
        healthz: SocketAddr::from(([127, 0, 0, 1], 0)),
        metrics: None,
        in_effect: InEffect::default(),
        adopt: false,
        socket_ender: None,
        silence: Silence { suspect_syns: 3, max_left_out: 50 },
        notices: Vec::new(),
        board: Default::default(),
        dataplane: Config {
            pins: None,
            source_check: traffic_policy_dataplane::SourceCheck::default(),
            local_delivery: traffic_policy_dataplane::LocalDelivery::default(),
            pod_services: traffic_policy_dataplane::PodServices::default(),
            table_size: traffic_policy_cluster::model::maglev::TableSize::default(),
            on_other_layout: Default::default(),
            sizes: Default::default(),
            idle: Default::default(),
            snat_ports: Default::default(),
            drain: Duration::ZERO,
            mode: traffic_policy_dataplane::Mode::Tc,
            cgroup: Default::default(),
        },
    }
}

impl Running {
    /// Starts the controller after `before` has prepared the folder and the fake.
    pub async fn start(timing: Timing, before: impl FnOnce(&Path, &Fake)) -> Self {
        Self::start_on(&[], timing, before).await
    }

    /// Does the same as [`Self::start`], with `--device`.
    pub async fn start_on(devices: &[&str], timing: Timing, before: impl FnOnce(&Path, &Fake)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let fake = Fake::default();
        before(folder.path(), &fake);
        let health = ProxyHealth::new(true, true);
        let (network, events) = Network::connect().unwrap();
        let manifests = Manifests { folder: folder.path().to_owned(), node_name: "here".to_owned() };
        let mut settings = settings(manifests);
        settings.devices = devices.iter().map(|&device| device.to_owned()).collect();
        let metrics = Metrics::new(settings.node_name.clone(), health.clone());
        let mut controller =
            Controller::new(settings, timing, fake.clone(), network, health.clone(), metrics.clone());
        controller.silence.ask_by(fake.ask(), fake.ways());
        let source = controller.start().await.unwrap();
        let (reloads, reloading) = Reloads::channel();
        let following = async move { controller.follow(source, events, reloading, Stop::listen()?).await };
        let task = tokio::spawn(following).abort_handle();
        Self { folder, fake, health, metrics, reloads, task }
    }

    /// Waits until the fake, or other observable state, is as wanted.
    pub async fn until(&self, what: &str, wanted: impl Fn(&Calls) -> bool) {
        let arrived = timeout(Duration::from_secs(20), async {
            while !wanted(&self.fake.calls()) {
                sleep(Duration::from_millis(10)).await;
            }
        });
        assert!(arrived.await.is_ok(), "not {what}: {:?}", self.fake.calls());
    }
}
