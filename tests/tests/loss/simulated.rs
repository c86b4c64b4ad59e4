//! `lb simulate` beside reality: scenes with real agents, a real load balancer and real requests, and the same scenes in the simulator.
//! It is given what was measured of the lab's run: when requests were sent, when checks began, when something was changed and when the
//! agents had written it. What becomes of each request, and when the balancer believes, it has to find out by itself.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use traffic_policy_agent::lb::{
    self, Change, Cluster as Objects, Event, Load, Measured, NodeChange, PodEvent, Simulated, Simulation,
    Timed,
};
use traffic_policy_agent::model::{self, Index, ServiceName};
use traffic_policy_agent::source;
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::netns::{Running, Stop};
use traffic_policy_testing::object::{Backend, Service};
use traffic_policy_testing::pace;
use traffic_policy_testing::traffic::balancer::Check;
use traffic_policy_testing::traffic::{NewConnections, connections, http};

use crate::cluster;
use crate::quiet;
use crate::switch::{Balanced, HEALTH_PORT, policy_cluster, policy_local};

const PER_SECOND: u32 = 200;
/// Of the lab's load balancer.
const INTERVAL: Duration = Duration::from_secs(1);
const FAILURES: u32 = 3;
/// A change so near a check that nobody can say which came first.
const NEAR: Duration = Duration::from_millis(20);
/// How often a scene is played again because a change fell upon a check.
const ATTEMPTS: usize = 5;
const POLL: Duration = Duration::from_millis(10);

/// A node's health port answers otherwise: some time between two questions.
#[derive(Clone, Copy)]
struct Changed {
    node: usize,
    from: Instant,
    to: Instant,
}

impl Changed {
    fn middle(self) -> Instant {
        self.from + (self.to - self.from) / 2
    }
}

/// Changes of what the health ports of all nodes answer.
struct Answers {
    seen: Arc<Mutex<Vec<Changed>>>,
    _running: Running<()>,
}

impl Answers {
    fn watch(balanced: &Balanced) -> Self {
        let lab = &balanced.cluster.lab;
        let ports: Vec<_> =
            lab.nodes().iter().map(|node| SocketAddr::new(node.address(Family::V4), HEALTH_PORT)).collect();
        let seen: Arc<Mutex<Vec<Changed>>> = Arc::default();
        let shared = seen.clone();
        let running = lab.client().netns().start("answers", async move |stop: Stop| {
            let mut last: Vec<Option<(Instant, String)>> = vec![None; ports.len()];
            while !stop.is_requested() {
                for (node, port) in ports.iter().enumerate() {
                    let asked = Instant::now();
                    let answer = http::get(*port, "/", Duration::from_secs(2)).await;
                    let answer = answer.map_or_else(|_| "none".to_owned(), |answer| answer.body);
                    let before = last[node].replace((asked, answer.clone()));
                    if let Some((from, _)) = before.filter(|(_, before)| *before != answer) {
                        let changed = Changed { node, from, to: Instant::now() };
                        shared.lock().unwrap_or_else(PoisonError::into_inner).push(changed);
                    }
                }
                // Between two looks.
                tokio::time::sleep(POLL).await;
            }
        });
        Self { seen, _running: running }
    }

    /// The first change of a node's answer that is seen after a moment.
    fn changed(&self, node: usize, after: Instant) -> Option<Changed> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.iter().find(|changed| changed.node == node && changed.to >= after).copied()
    }
}

/// A scene as it is played: its clock, and what happened.
struct Scene {
    balanced: Balanced,
    answers: Answers,
    objects: Objects,
    start: Instant,
    sent: Arc<Mutex<Vec<Duration>>>,
    meter: NewConnections,
    events: Vec<Timed>,
    /// Moments at which an object was changed, and the nodes whose answers tell that their agents know.
    written: Vec<(Instant, Vec<usize>)>,
    /// Spans in which checks of these nodes must not lie.
    critical: Vec<(Instant, Instant, Vec<usize>)>,
    controller: Duration,
}

/// What became of it in the lab.
struct Played {
    report: connections::Report,
    simulation: Measured,
    is_clear: bool,
}

impl Scene {
    fn begin(balanced: Balanced, total: u64) -> Self {
        let answers = Answers::watch(&balanced);
        let mut index = Index::default();
        source::read_cluster(balanced.cluster.manifests.folder()).unwrap().apply(&mut index);
        let (start, sent) = (Instant::now(), Arc::new(Mutex::new(Vec::new())));
        let (chooser, shared) = (balanced.balancer.chooser(), sent.clone());
        let choose = move |number| {
            shared.lock().unwrap_or_else(PoisonError::into_inner).push(start.elapsed());
            chooser.choose(number)
        };
        let client = balanced.cluster.lab.client().netns();
        let meter = NewConnections::start_bounded(client, PER_SECOND, total, choose);
        Self {
            answers,
            objects: Objects::new(index),
            start,
            sent,
            meter,
            events: Vec::new(),
            written: Vec::new(),
            critical: Vec::new(),
            controller: Duration::ZERO,
            balanced,
        }
    }

    /// Waits until the last check of each node is over, and the next is not near.
    fn between_checks(&self) {
        pace::until("a moment without checks", Duration::from_secs(60), || {
            let mut last = BTreeMap::new();
            for Check { node, began, .. } in self.balanced.balancer.asked() {
                last.insert(node, began.elapsed());
            }
            let nodes = self.balanced.cluster.lab.nodes().len();
            // Where nobody answers the next check begins as soon as one is over.
            last.len() == nodes && last.values().all(|ago| (150..400).contains(&ago.as_millis()))
        });
    }

    /// Does something, and tells the simulator of it as of a moment in the middle of it.
    fn happens(&mut self, event: Event, act: impl FnOnce(&mut Balanced)) -> (Instant, Instant) {
        let before = Instant::now();
        act(&mut self.balanced);
        let after = Instant::now();
        let at = before + (after - before) / 2;
        self.events.push(Timed { at: at - self.start, event });
        (before, after)
    }

    /// Changes objects; `tells` are the nodes whose health ports answer otherwise for it.
    fn changes(&mut self, event: Event, tells: &[usize], act: impl FnOnce(&Balanced)) {
        let (before, _) = self.happens(event, |balanced| act(balanced));
        pace::until("the agents", Duration::from_secs(10), || {
            tells.iter().all(|node| self.answers.changed(*node, before).is_some())
        });
        self.written.push((before, tells.to_vec()));
    }

    /// What was changed last counts for checks only once the agents have written it: no check may come near that.
    fn agents_are_checked(&mut self) {
        let Some((from, tells)) = self.written.last() else { return };
        for node in tells {
            let changed = self.answers.changed(*node, *from).unwrap();
            self.critical.push((changed.from, changed.to, vec![*node]));
        }
    }

    /// The cloud's controller has seen the change of the Service, which was the last.
    fn controller_asks(&mut self, port: u16) {
        self.between_checks();
        let (changed, _) = self.written.last().unwrap();
        let changed = *changed;
        let before = Instant::now();
        self.balanced.balancer.check_on(port);
        let after = Instant::now();
        self.controller = after - changed;
        self.critical.push((before, after, (0..self.balanced.cluster.lab.nodes().len()).collect()));
    }

    fn end(self) -> (Balanced, Objects, Vec<Timed>, Duration, Played) {
        let Self { balanced, answers, objects, start, sent, meter, events, written, critical, controller } =
            self;
        let report = meter.wait();
        let names: Vec<_> = balanced.cluster.lab.nodes().iter().map(|node| node.name.clone()).collect();
        let checks = balanced.balancer.asked();
        let is_clear = critical.iter().all(|(from, to, nodes)| {
            let near = |check: &Check| check.began <= *to + NEAR && check.ended + NEAR >= *from;
            let of = |check: &Check| nodes.iter().any(|node| names[*node] == check.node);
            !checks.iter().any(|check| of(check) && near(check))
        });
        let mut simulation = Measured {
            requests: Some(sent.lock().unwrap_or_else(PoisonError::into_inner).clone()),
            ..Measured::default()
        };
        for (number, name) in names.iter().enumerate() {
            let own = checks.iter().filter(|check| check.node == *name && check.began >= start);
            simulation.checks.insert(name.clone(), own.map(|check| check.began - start).collect());
            let moments = written.iter().map(|(from, tells)| {
                // A node whose answer stays as it was has learned of it as others have.
                let of = if tells.contains(&number) { number } else { tells[0] };
                answers.changed(of, *from).unwrap().middle() - start
            });
            simulation.agents.insert(name.clone(), moments.collect());
        }
        (balanced, objects, events, controller, Played { report, simulation, is_clear })
    }
}

/// The lab's load balancer as a profile.
fn profile(controller: Duration) -> lb::Balancer {
    let mut balancer = lb::by_name("custom").unwrap().clone();
    for check in [&mut balancer.cluster, &mut balancer.local] {
        check.interval.value = INTERVAL;
        check.timeout.value = INTERVAL;
        check.failures.value = FAILURES;
        check.successes.value = 1;
    }
    balancer.controller.value = controller;
    balancer
}

/// Within 5 % or 3.
fn agree(found: u64, expected: u64) -> bool {
    found.abs_diff(expected) <= (expected / 20).max(3)
}

/// Plays a scene until no change falls upon a check, simulates it, and compares. Gives the requests that were lost; `None` if the machine is
/// too busy to measure.
fn compare(what: &str, play: impl Fn() -> Scene) -> Option<u64> {
    let name = ServiceName { namespace: "default".to_owned(), name: "web".to_owned() };
    for _ in 0..ATTEMPTS {
        let (balanced, objects, events, controller, played) = play().end();
        let Played { report, simulation, is_clear } = played;
        if !is_clear {
            println!("{what}: a change fell upon a check; once more");
            continue;
        }
        let requests = simulation.requests.iter().flatten().copied();
        let last = requests.chain(events.iter().map(|event| event.at)).max().unwrap();
        let simulated: Simulated = Simulation {
            cluster: &objects,
            service: &name,
            balancer: profile(controller),
            events,
            learn: lb::Learn::default(),
            load: Load { rate: PER_SECOND, lasts: last + INTERVAL, request: Duration::ZERO },
            seed: 1,
            measured: simulation,
        }
        .run()
        .unwrap();
        let total = simulated.total();
        // A request whose first segment was dropped was lost, too, be it answered when it was sent again.
        let lost = report.failed + report.resent;
        let mut figures = balanced.figures(what, &report);
        figures += &format!("\n  simulated: {total:?} {:?}\n  {:?}", simulated.why, simulated.line);
        println!("{what}: lost in the lab {lost}, simulated {}\n{figures}", total.lost);
        assert_eq!(total.all(), report.ok + report.failed, "{figures}");
        assert!(agree(total.lost, lost), "lost in the lab {lost}, simulated {}: {figures}", total.lost);
        for node in balanced.cluster.lab.nodes() {
            let at = SocketAddr::new(node.address(Family::V4), cluster::NODE_PORT);
            let sent = report.by_target.get(&at).copied().unwrap_or(0);
            let found = simulated.by_node()[node.name.as_str()].all();
            assert!(agree(found, sent), "{}: sent {sent}, simulated {found}: {figures}", node.name);
        }
        return Some(lost);
    }
    let why = "a change fell upon a check each time, this machine is too busy";
    writeln!(std::io::stderr(), "SKIPPED {what}: {why}").ok();
    None
}

fn drain(service: &Service, time: &str) -> Service {
    service.clone().annotation("traffic-policy.io/drain", time)
}

#[test]
fn a_preempted_node() {
    let _alone = quiet::alone();
    let lost = compare("node-3 is preempted", || {
        let balanced = Balanced::start("xdp", &[], &policy_cluster(), 10256);
        balanced.wait_for(&["node-1", "node-2", "node-3"]);
        let mut scene = Scene::begin(balanced, 1600);
        // One check of each node before anything happens.
        sleep(INTERVAL);
        scene.between_checks();
        let gone = Event::Change(Change::Node("node-3".to_owned(), NodeChange::Gone));
        let (before, after) = scene.happens(gone, |balanced| {
            let lab = &balanced.cluster.lab;
            lab.cut(lab.node(3)).unwrap();
        });
        scene.critical.push((before, after, vec![2]));
        scene
    });
    assert!(lost.is_none_or(|lost| lost > 100), "{lost:?}");
}

fn switch(what: &str, time: &str) -> Option<u64> {
    let _alone = quiet::alone();
    compare(what, || {
        let balanced = Balanced::start("xdp", &[], &drain(&policy_cluster(), time), 10256);
        balanced.wait_for(&["node-1", "node-2", "node-3"]);
        let mut scene = Scene::begin(balanced, 2400);
        // One check of each node before anything happens.
        sleep(INTERVAL);
        let local = Event::Change(Change::Policy(model::Policy::Local));
        scene.changes(local, &[0, 1, 2], |balanced| {
            balanced.cluster.manifests.service(&drain(&policy_local(), time)).unwrap();
        });
        // The balancer's controller takes so long to move the check to the health port.
        sleep(INTERVAL * 3);
        scene.controller_asks(HEALTH_PORT);
        scene
    })
}

#[test]
fn a_switch_without_a_drain() {
    let lost = switch("Cluster → Local, no drain", "0");
    assert!(lost.is_none_or(|lost| lost > 100), "{lost:?}");
}

#[test]
fn a_switch_with_a_drain_that_is_too_short() {
    let lost = switch("Cluster → Local, 2 s", "2s");
    assert!(lost.is_none_or(|lost| lost > 100), "{lost:?}");
}

#[test]
fn a_switch_with_a_drain() {
    let lost = switch("Cluster → Local, 60 s", "60s");
    assert!(lost.is_none_or(|lost| lost == 0), "{lost:?}");
}

/// Of a rolling update: the new pod, the old one, its node by number, ready pods with both, and those after it.
type Step = (&'static str, &'static str, usize, &'static [&'static str], &'static [&'static str]);

/// The pods of node-1 and node-2 are replaced by two on node-3, under policy Local.
fn rolling_update(what: &str, stops_at_once: bool) -> Option<u64> {
    let _alone = quiet::alone();
    compare(what, || {
        let mut base = cluster::without_agents(&[1, 1, 2], "xdp");
        let backends = |base: &traffic_policy_testing::cluster::Cluster, names: &[&str]| -> Vec<Backend> {
            base.lab.pods().filter(|pod| names.contains(&pod.name.as_str())).map(Backend::of).collect()
        };
        let first = backends(&base, &["pod-1-1", "pod-2-1"]);
        base.manifests.apply(&policy_local(), &first).unwrap();
        base.launch(|agent| agent.attach("xdp")).unwrap();
        let balanced = Balanced::before(base, HEALTH_PORT);
        balanced.wait_for(&["node-1", "node-2"]);
        let mut scene = Scene::begin(balanced, if stops_at_once { 3000 } else { 4000 });
        // One check of each node before anything happens.
        sleep(INTERVAL);
        let steps: [Step; 2] = [
            ("pod-3-1", "pod-1-1", 0, &["pod-1-1", "pod-2-1", "pod-3-1"], &["pod-2-1", "pod-3-1"]),
            ("pod-3-2", "pod-2-1", 1, &["pod-2-1", "pod-3-1", "pod-3-2"], &["pod-3-1", "pod-3-2"]),
        ];
        for (new, old, node, with_both, after) in steps {
            scene.between_checks();
            let ready = Event::Pod(new.to_owned(), PodEvent::Ready("node-3".to_owned()));
            scene.changes(ready, &[2], |balanced| {
                let backends = backends(&balanced.cluster, with_both);
                balanced.cluster.manifests.endpoints(&policy_local(), &backends).unwrap();
            });
            scene.agents_are_checked();
            scene.between_checks();
            if stops_at_once {
                let stopped = Event::Pod(old.to_owned(), PodEvent::Stopped);
                scene.happens(stopped, |balanced| balanced.cluster.stop_server(old));
            }
            let removed = Event::Pod(old.to_owned(), PodEvent::Removed);
            let terminating = Event::Pod(old.to_owned(), PodEvent::Terminating);
            let event = if stops_at_once { removed } else { terminating };
            scene.changes(event, &[node], |balanced| {
                let mut backends = backends(&balanced.cluster, after);
                if !stops_at_once {
                    let pod = balanced.cluster.lab.pods().find(|pod| pod.name == old).unwrap();
                    backends.push(Backend::of(pod).terminating());
                }
                balanced.cluster.manifests.endpoints(&policy_local(), &backends).unwrap();
            });
            scene.agents_are_checked();
            let name = scene.balanced.cluster.lab.nodes()[node].name.clone();
            pace::until("the balancer", Duration::from_secs(20), || {
                !scene.balanced.balancer.healthy().contains(&name)
            });
            if !stops_at_once {
                let stopped = Event::Pod(old.to_owned(), PodEvent::Stopped);
                scene.happens(stopped, |balanced| balanced.cluster.stop_server(old));
            }
        }
        scene
    })
}

#[test]
fn a_rolling_update_of_pods_that_stop_at_once() {
    let lost = rolling_update("rolling update, pods stop at once", true);
    assert!(lost.is_none_or(|lost| lost > 100), "{lost:?}");
}

#[test]
fn a_rolling_update_of_pods_that_go_on_serving() {
    let lost = rolling_update("rolling update, pods go on serving", false);
    assert!(lost.is_none_or(|lost| lost == 0), "{lost:?}");
}
