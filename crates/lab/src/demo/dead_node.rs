//! The death of a node with a third of the pods, while connections are opened through the others:
//! with the agents, and with kube-proxy's rules in their place.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::Value;
use traffic_policy_lb::{
    self as lb, Change, Counts, Event, Learn, Load, Measured, NodeChange, Proxy, Simulation, Timed,
};
use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::kube_proxy::{Backend, KubeProxy, Rules, TCP_AND_UDP};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Policy, node};
use traffic_policy_testing::pace::scaled;
use traffic_policy_testing::recording::{self, profile};
use traffic_policy_testing::traffic::balancer::Timing;
use traffic_policy_testing::traffic::connections::{Ended, NewConnections, Report};
use traffic_policy_testing::traffic::http;

use super::cluster::{self, DemoCluster, HEALTHZ_PORT, LOAD_BALANCER_IP, NODE_PORT, RATE, section};
use super::scene::named;

/// Time before the death; [`REST`] is the time after it.
const QUIET: Duration = Duration::from_secs(1);
const REST: Duration = Duration::from_secs(4);
/// The time after which a client gives up, on a fast machine.
const PATIENCE: Duration = Duration::from_secs(3);
/// The time from the first SYN without an answer to the judgement of an agent: 200 ms until the
/// suspicion, 300 ms of asking.
const JUDGED_AFTER: Duration = Duration::from_millis(500);
/// The part of the connections that go to the node's pod.
const SHARE: f64 = 1.0 / 3.0;
/// Nodes with this label are no members of load balancers.
const EXCLUDED: &str = "node.kubernetes.io/exclude-from-external-load-balancers";

/// One death, played and simulated.
pub struct Death {
    pub proxy: Proxy,
    /// The time of the death since the first request: when it began, and when no packet passed any
    /// more.
    pub cut: Duration,
    pub gone: Duration,
    pub report: Report,
    /// The pod of the dead node.
    pub pod: String,
    /// The result of `lb simulate` before, and with the measured times.
    pub predicted: Counts,
    pub replayed: Counts,
    /// The time from the death to the moment at which each of the other nodes had left it out;
    /// those that did not are missing.
    pub left_out: Vec<Duration>,
}

/// The return of the node.
pub struct Return {
    /// The time until both other nodes had sent it a connection again.
    pub after: Duration,
    /// The part of the connections that its pod got from then on.
    pub share: f64,
}

/// A cluster like the demo's, with kube-proxy's rules on its nodes in place of agents.
pub struct KubeProxyCluster(Cluster);

impl KubeProxyCluster {
    pub fn build(attach: &str) -> Result<Self> {
        ensure!(Backend::Nftables.is_there(), "the scene of the dead node needs nft: install nftables");
        let cluster = Cluster::start(cluster::lab(attach))?;
        let rules = Rules {
            name: "web".to_owned(),
            protocols: TCP_AND_UDP.to_vec(),
            cluster_ip: SocketAddr::new([10, 96, 0, 80].into(), 80),
            vip: Some(SocketAddr::new(LOAD_BALANCER_IP.parse()?, 80)),
            node_port: Some(NODE_PORT),
            endpoints: cluster.lab.pods().map(|pod| (pod.address(Family::V4), TARGET).into()).collect(),
            local: None,
        };
        for node in cluster.lab.nodes() {
            KubeProxy::start(node, Family::V4, Backend::Nftables, std::slice::from_ref(&rules))?;
        }
        Ok(Self(cluster))
    }

    /// Plays the death. The objects are those of the demo's cluster, which is the same but for the
    /// agents.
    pub fn death(&self, cluster: &DemoCluster) -> Result<Death> {
        let predicted = Self::predict(cluster)?;
        self.judge(cluster, predicted, play(&self.0.lab, &[])?)
    }

    fn predict(cluster: &DemoCluster) -> Result<Counts> {
        simulate(cluster, Proxy::KubeProxy, QUIET, None, Learn::default().agent)
    }

    fn judge(&self, cluster: &DemoCluster, predicted: Counts, played: Played) -> Result<Death> {
        let Played { cut, gone, report, sent, left_out } = played;
        let replayed = simulate(cluster, Proxy::KubeProxy, cut, Some(sent), Learn::default().agent)?;
        let pod = self.0.lab.node(1).pod(1).name.clone();
        Ok(Death { proxy: Proxy::KubeProxy, cut, gone, report, pod, predicted, replayed, left_out })
    }
}

/// Plays the death with the agents of the demo. The node stays dead.
pub fn death(cluster: &DemoCluster) -> Result<Death> {
    let proxy = Proxy::default();
    let predicted = simulate(cluster, proxy, QUIET, None, cluster.reaction())?;
    let lab = &cluster.base.lab;
    let others =
        lab.nodes().iter().skip(1).map(|node| SocketAddr::new(node.address(Family::V4), HEALTHZ_PORT));
    let Played { cut, gone, report, sent, left_out } = play(lab, &others.collect::<Vec<_>>())?;
    // The first SYN to the dead node comes some time after the death: each of the two others sends
    // it that part of its half of the requests.
    let first = Duration::from_secs_f64(2.0 / (f64::from(RATE) * SHARE));
    let delays = left_out.iter().map(|after| after.saturating_sub(JUDGED_AFTER + first));
    let reaction = if left_out.len() == 2 { delays.sum::<Duration>() / 2 } else { REST };
    let replayed = simulate(cluster, proxy, cut, Some(sent), reaction)?;
    let pod = lab.node(1).pod(1).name.clone();
    Ok(Death { proxy, cut, gone, report, pod, predicted, replayed, left_out })
}

/// Restores the node, and waits until both other nodes send it connections again.
pub fn back(cluster: &DemoCluster) -> Result<Return> {
    let lab = &cluster.base.lab;
    let (client, pod) = (lab.client().netns(), &lab.node(1).pod(1).name);
    let start = Instant::now();
    lab.mend(lab.node(1))?;
    let meter = |connections| {
        let began = start.elapsed();
        let report =
            NewConnections::start_patient(client, RATE, connections, scaled(PATIENCE), in_turn(lab)).wait();
        let its = report.ended.into_iter().filter(|ended| ended.pod.as_ref() == Some(pod));
        its.map(|ended| (began + ended.at, ended.target)).collect::<Vec<_>>()
    };
    let (mut by, mut after) = (BTreeSet::new(), Duration::ZERO);
    while by.len() < 2 {
        ensure!(start.elapsed() < scaled(Duration::from_secs(10)), "only {by:?} sends to {pod} again");
        for (at, target) in meter(50) {
            if by.insert(target) {
                after = after.max(at);
            }
        }
    }
    let connections = u64::from(RATE);
    Ok(Return { after, share: meter(connections).len() as f64 / connections as f64 })
}

/// Makes the node whose death is played a node that no load balancer sends to, or one like all.
pub fn exclude(cluster: &DemoCluster, excluded: bool) -> Result<()> {
    let nodes = cluster.base.lab.nodes().iter().enumerate().map(|(number, of)| {
        let mut object = node::object(of);
        if excluded && number == 0 {
            object["metadata"]["labels"][EXCLUDED] = "".into();
        }
        object
    });
    cluster.base.manifests.write("nodes", &nodes.collect::<Vec<_>>())
}

pub(super) fn show(cluster: &DemoCluster, attach: &str) -> Result<Vec<String>> {
    section(
        "7. THE NODE THAT DIES",
        "node-1 has a third of the pods, and dies without a word. For 40 to 60 s its pod stays ready in Kubernetes, and\n\
         kube-proxy sends it every third new connection. The agents of node-2 and node-3 notice SYNs that nobody answers, ask\n\
         node-1, and leave it out; a client's second SYN, a second later, goes to another pod. The load balancer sends to\n\
         node-2 and node-3 only, and a client gives up after 3 seconds.",
    );
    cluster.set(Policy::Cluster, Some("0"))?;
    exclude(cluster, true)?;
    let kube_proxy = KubeProxyCluster::build(attach)?;
    let predicted = KubeProxyCluster::predict(cluster)?;
    // Both nodes die at the same time, each in a cluster of its own.
    let (death, back, without) = scope(|scope| {
        let played = scope.spawn(|| play(&kube_proxy.0.lab, &[]));
        let (death, back) = (death(cluster)?, back(cluster)?);
        let played = played.join().unwrap_or_else(|panic| resume_unwind(panic))?;
        anyhow::Ok((death, back, kube_proxy.judge(cluster, predicted, played)?))
    })?;
    exclude(cluster, false)?;
    println!(
        "  {:<15} REQUESTS     OK DELAYED   LOST   PREDICTED               REPLAYED                SLOWEST",
        "PROXY"
    );
    for death in [&death, &without] {
        println!("  {}", death.figures());
    }
    let seconds: Vec<_> = (0..(QUIET + REST).as_secs()).collect();
    println!("\n  {:<41} {}", "IN SECOND", cells(seconds.iter().copied()));
    for death in [&death, &without] {
        let by = death.proxy.name();
        let row = |what: &str, is: &dyn Fn(&Ended) -> bool| {
            println!(
                "  {by:<15} {what:<25} {}",
                cells(seconds.iter().map(|second| death.count(*second, is)))
            );
        };
        row(&format!("answered by {}", death.pod), &|ended| ended.pod.as_ref() == Some(&death.pod));
        row("answered to a second SYN", &|ended| ended.resent);
        row("lost", &is_lost);
    }
    println!("\n  (node-1 dies after {} s. DELAYED: answered to the client's second SYN.)", QUIET.as_secs());
    let noticed: Vec<_> = death.left_out.iter().map(|at| format!("{:.1}", at.as_secs_f64())).collect();
    println!("  Left out by the agents of node-2 and node-3 after {} s.", noticed.join(" and "));
    println!(
        "  Then node-1 is back: both send to it again after {:.1} s, {:.0} % of all connections.",
        back.after.as_secs_f64(),
        back.share * 100.0
    );
    Ok([&death, &without].into_iter().flat_map(Death::differences).collect())
}

fn cells(counts: impl Iterator<Item = u64>) -> String {
    counts.map(|count| format!("{count:>6}")).collect()
}

impl Death {
    /// Returns the numbers of requests: all, answered, delayed, lost, and those in the simulator.
    fn figures(&self) -> String {
        let Self { proxy, report, predicted, replayed, .. } = self;
        let of = |counts: &Counts| format!("{} delayed, {} lost", counts.delayed, counts.lost);
        format!(
            "{:<15} {:>8} {:>6} {:>7} {:>6}   {:<23} {:<23} {:.1} s",
            proxy.name(),
            report.ok + report.failed,
            report.ok,
            report.resent,
            self.lost(),
            of(predicted),
            of(replayed),
            report.slowest.as_secs_f64()
        )
    }

    /// Returns the number of requests of a second of the scene that are meant.
    pub fn count(&self, second: u64, is: impl Fn(&Ended) -> bool) -> u64 {
        self.report.ended.iter().filter(|ended| ended.at.as_secs() == second && is(ended)).count() as u64
    }

    /// Returns the number of requests that never reached a pod. Those that the death has cut off
    /// are not among them: no proxy can move an established connection of the dead pod.
    pub fn lost(&self) -> u64 {
        self.report.failed - self.cut_off().count() as u64
    }

    /// Returns the requests that had their connection, and lost it before the answer: on a busy
    /// machine some are always under way.
    pub fn cut_off(&self) -> impl Iterator<Item = &Ended> {
        self.report.ended.iter().filter(|ended| ended.pod.is_none() && ended.established)
    }

    /// Returns sentences about the agents that did not notice the death, and the numbers of which
    /// the simulator disagrees.
    pub fn differences(&self) -> Vec<String> {
        let name = self.proxy.name();
        let mut differences = Vec::new();
        if self.proxy != Proxy::KubeProxy && self.left_out.len() < 2 {
            differences.push(format!("{} of 2 agents left out the dead node", self.left_out.len()));
        }
        for (what, happened, replayed) in [
            ("delayed", self.report.resent, self.replayed.delayed),
            ("lost", self.lost(), self.replayed.lost),
        ] {
            if replayed.abs_diff(happened) > allowed(replayed) {
                differences
                    .push(format!("{name}: {happened} requests were {what}, {replayed} in the simulator"));
            }
        }
        differences
    }
}

/// The difference that chance allows between two counts of requests to the dead node: four standard
/// deviations of the difference of two binomial distributions, or 3.
pub fn allowed(count: u64) -> u64 {
    (4.0 * (2.0 * count as f64 * (1.0 - SHARE)).sqrt()).max(3.0) as u64
}

/// Whether a request never reached a pod.
fn is_lost(ended: &Ended) -> bool {
    ended.pod.is_none() && !ended.established
}

/// A scene as it was played.
struct Played {
    cut: Duration,
    gone: Duration,
    report: Report,
    /// The times at which the requests were sent.
    sent: Vec<Duration>,
    left_out: Vec<Duration>,
}

/// Cuts off the first node under requests to the others. `agents`: where those agents answer
/// /healthz that are to leave it out.
fn play(lab: &Lab, agents: &[SocketAddr]) -> Result<Played> {
    let (start, sent) = (Instant::now(), Arc::new(Mutex::new(Vec::new())));
    let (choose, shared) = (in_turn(lab), sent.clone());
    let choose = move |number| {
        shared.lock().unwrap_or_else(PoisonError::into_inner).push(start.elapsed());
        choose(number)
    };
    let total = u64::from(RATE) * (QUIET + REST).as_secs();
    let client = lab.client().netns();
    let meter = NewConnections::start_patient(client, RATE, total, scaled(PATIENCE), choose);
    // The scene's own moment: nothing is waited for.
    sleep(QUIET);
    let cut = start.elapsed();
    lab.cut(lab.node(1))?;
    let gone = start.elapsed();
    let name = &lab.node(1).name;
    let is_over = AtomicBool::new(false);
    let (report, left_out) = scope(|scope| {
        let over = &is_over;
        let watches: Vec<_> = agents
            .iter()
            .map(|agent| {
                scope.spawn(move || {
                    while !over.load(Ordering::Relaxed) {
                        let said = http::get_from(client, *agent, "/healthz");
                        if said.is_ok_and(|said| leaves_out(&said.body, name)) {
                            return Some(start.elapsed() - cut);
                        }
                        // The interval between two looks: three requests come in it.
                        sleep(Duration::from_millis(10));
                    }
                    None
                })
            })
            .collect();
        let report = meter.wait();
        over.store(true, Ordering::Relaxed);
        (report, watches.into_iter().filter_map(|watch| watch.join().ok().flatten()).collect())
    });
    let sent = std::mem::take(&mut *sent.lock().unwrap_or_else(PoisonError::into_inner));
    Ok(Played { cut, gone, report, sent, left_out })
}

/// Whether an agent leaves out a node, by the body of its /healthz.
fn leaves_out(body: &str, node: &str) -> bool {
    let body: Value = serde_json::from_str(body).unwrap_or_default();
    body["leftOut"].as_array().is_some_and(|names| names.iter().any(|name| name == node))
}

/// Returns a load balancer of all nodes but the first.
fn in_turn(lab: &Lab) -> impl Fn(u64) -> Option<SocketAddr> + Send + 'static {
    let nodes = lab.nodes().iter().skip(1);
    let at: Vec<_> = nodes.map(|node| SocketAddr::new(node.address(Family::V4), NODE_PORT)).collect();
    move |number| at.get((number % at.len().max(1) as u64) as usize).copied()
}

/// Plays the scene in the simulator. `reaction`: the time from an agent's judgement to its effect.
fn simulate(
    cluster: &DemoCluster,
    proxy: Proxy,
    gone_at: Duration,
    requests: Option<Vec<Duration>>,
    reaction: Duration,
) -> Result<Counts> {
    let gone = Change::Node(cluster.base.lab.node(1).name.clone(), NodeChange::Gone);
    let simulation = Simulation {
        cluster: &recording::objects(&cluster.base)?,
        service: &named("web"),
        balancer: profile(&lb::CUSTOM, Timing::default()),
        proxy,
        events: vec![Timed { at: gone_at, event: Event::Change(gone) }],
        learn: Learn { agent: reaction, ..Learn::default() },
        load: Load { rate: RATE, lasts: QUIET + REST, request: Duration::ZERO },
        seed: 1,
        measured: Measured { requests, ..Measured::default() },
    };
    Ok(simulation.run()?.total())
}
