//! Nodes of a fleet: the part of each agent that follows the API and posts Events for warnings.

use std::{collections::BTreeSet, fs, time::Duration};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;
use tokio::{sync::watch, task::JoinHandle, time::timeout};
use traffic_policy_cluster::{
    model::{Endpoint, Index, NodeInput},
    source::{Access, Kubernetes, ObjectEvent, Source, Subject},
};
use traffic_policy_testing::api_server::ApiServer;

/// Time limit for all nodes to see a change; after an outage they take half a minute by intention.
const PATIENCE: Duration = Duration::from_secs(300);

/// Number of nodes that start together.
const AT_A_TIME: usize = 4;

/// The state that a node knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Known {
    synced: bool,
    /// Number of Services whose endpoints have moved once; `moved_twice` counts those that moved
    /// twice.
    pub(super) moved: u32,
    pub(super) moved_twice: u32,
    /// Warnings about Services.
    pub(super) warnings: BTreeSet<String>,
}

struct Node {
    known: watch::Receiver<Known>,
    task: JoinHandle<()>,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Node {
    async fn start(access: Access, name: String) -> Result<Self> {
        let source = Kubernetes::new(access, &name).start().await?;
        let (sender, known) = watch::channel(Known::default());
        Ok(Self { known, task: tokio::spawn(follow(source, name, sender)) })
    }

    async fn wait(&self, what: &str, condition: impl Fn(&Known) -> bool) -> Result<()> {
        let mut known = self.known.clone();
        let waiting = known.wait_for(|known| condition(known));
        let found = timeout(PATIENCE, waiting).await.map(|found| found.map(drop));
        let last = || format!("{what}: {:?}", *self.known.borrow());
        found
            .with_context(|| format!("waited in vain until {}", last()))?
            .with_context(|| format!("a source has ended before {}", last()))
    }
}

/// Follows the API like the run loop: arriving objects enter the index, and new warnings about
/// Services become Events.
async fn follow(mut source: Source, node_name: String, sender: watch::Sender<Known>) {
    let mut index = Index::default();
    let mut warned = BTreeSet::new();
    while let Some(batch) = source.next().await {
        batch.apply(&mut index);
        while let Some(batch) = source.try_next() {
            batch.apply(&mut index);
        }
        if !index.is_synced() {
            continue;
        }
        let _ = index.update(&NodeInput { node_name: node_name.clone(), ipv4: true, ..NodeInput::default() });
        let desired = index.desired();
        for warning in desired.warnings.difference(&warned) {
            if let Some(service) = &warning.service {
                let subject = Subject::Service(service.clone());
                source.events().post(ObjectEvent::warning(
                    subject,
                    "Misconfigured",
                    "Program",
                    warning.text.clone(),
                ));
            }
        }
        warned.clone_from(&desired.warnings);
        let first = |endpoints: &[Endpoint]| endpoints.first().map(|endpoint| endpoint.address.to_string());
        let endpoints: Vec<String> = desired.ports.values().filter_map(|port| first(&port.cluster)).collect();
        let moved = |prefix: &str| {
            u32::try_from(endpoints.iter().filter(|endpoint| endpoint.starts_with(prefix)).count())
                .unwrap_or(u32::MAX)
        };
        let known = Known {
            synced: true,
            moved: moved("10.129."),
            moved_twice: moved("10.130."),
            warnings: warned
                .iter()
                .filter(|warning| warning.service.is_some())
                .map(|warning| warning.text.clone())
                .collect(),
        };
        if sender.send(known).is_err() {
            return;
        }
    }
}

pub(super) struct Nodes {
    nodes: Vec<Node>,
    files: TempDir,
}

impl Nodes {
    /// Starts nodes, some at a time, and waits until they know all objects: the count then holds
    /// their requests, and no time-outs of a machine that has to be all of them.
    pub(super) async fn start(server: &ApiServer, count: u32) -> Result<Self> {
        let files = tempfile::tempdir()?;
        fs::write(files.path().join("token"), "token")?;
        fs::write(files.path().join("ca.crt"), server.certificate().context("the server has no TLS")?)?;
        let mut all = Self { nodes: Vec::new(), files };
        for number in 0..count {
            let node = Node::start(all.access(server), format!("node-{number}")).await?;
            all.nodes.push(node);
            if let Some(earlier) = all.nodes.iter().rev().nth(AT_A_TIME) {
                earlier.wait("all is listed", |known| known.synced).await?;
            }
        }
        all.wait("all is listed", |known| known.synced).await?;
        Ok(all)
    }

    fn access(&self, server: &ApiServer) -> Access {
        let service_account = self.files.path().to_owned();
        Access::InCluster { api_server: Some(server.url()), service_account }
    }

    /// Waits until each node satisfies the condition.
    pub(super) async fn wait(&self, what: &str, condition: impl Fn(&Known) -> bool) -> Result<()> {
        for node in &self.nodes {
            node.wait(what, &condition).await?;
        }
        Ok(())
    }

    /// Replaces each node by a new one; the next one follows only when that node knows what it
    /// should.
    pub(super) async fn replace_each(
        &mut self,
        server: &ApiServer,
        condition: impl Fn(&Known) -> bool,
    ) -> Result<()> {
        ensure!(!self.nodes.is_empty(), "there are no nodes");
        for number in 0..self.nodes.len() {
            let node = Node::start(self.access(server), format!("node-{number}")).await?;
            self.nodes[number] = node;
            self.nodes[number].wait("a new agent knows all", &condition).await?;
        }
        Ok(())
    }
}
