//! Health ports while the agent is replaced: the time without an answer, and the correctness of the
//! answers after it.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::netns::{Namespace, Running, Stop};
use traffic_policy_testing::object::Backend;
use traffic_policy_testing::pace::{scaled, until};
use traffic_policy_testing::traffic::http;

use crate::cluster::{self, PATIENCE};
use crate::quiet;
use crate::switch::{HEALTH_PORT, policy_local};

const HEALTHZ: u16 = 10256;
/// The interval between two requests to a port.
const PERIOD: Duration = Duration::from_millis(5);

/// A series of equal answers: their status, `None` if refused, and the time of the first request.
#[derive(Clone, Copy, Debug)]
struct Phase {
    status: Option<u16>,
    first: Instant,
}

/// Requests a port again and again, as a load balancer does, but more often.
struct Watch {
    phases: Arc<Mutex<Vec<Phase>>>,
    _running: Running<()>,
}

impl Watch {
    fn start(namespace: &Namespace, server: SocketAddr, path: &'static str) -> Self {
        let phases = Arc::new(Mutex::new(Vec::<Phase>::new()));
        let noted = Arc::clone(&phases);
        let work = async move |stop: Stop| {
            while !stop.is_requested() {
                let asked = Instant::now();
                let answer = http::get(server, path, scaled(Duration::from_secs(3))).await;
                let status = answer.ok().map(|response| response.status);
                {
                    let mut phases = noted.lock().unwrap_or_else(PoisonError::into_inner);
                    if phases.last().is_none_or(|phase| phase.status != status) {
                        phases.push(Phase { status, first: asked });
                    }
                }
                // A request every few milliseconds, and not as many as the CPU allows.
                tokio::time::sleep(PERIOD).await;
            }
        };
        Self { phases, _running: namespace.start("health checks", work) }
    }

    fn phases(&self) -> Vec<Phase> {
        self.phases.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The statuses in their order.
    fn statuses(&self) -> Vec<Option<u16>> {
        self.phases().iter().map(|phase| phase.status).collect()
    }

    fn last(&self) -> Option<u16> {
        self.statuses().last().copied().flatten()
    }

    /// The time from this moment until a listener was back, and until it answered 200.
    fn back(&self, started: Instant) -> [Duration; 2] {
        let phases = self.phases();
        let since = |wanted: fn(&Phase) -> bool| {
            let phase = phases.iter().find(|phase| phase.first >= started && wanted(phase)).unwrap();
            phase.first - started
        };
        [since(|phase| phase.status.is_some()), since(|phase| phase.status == Some(200))]
    }
}

/// The watches of one node: /healthz and the health-check port of a Service.
struct Watches {
    healthz: Watch,
    service: Watch,
}

impl Watches {
    fn start(cluster: &traffic_policy_testing::cluster::Cluster) -> Self {
        let client = cluster.lab.client().netns();
        let at = |port| cluster.at(1, Family::V4, port);
        let watches = Self {
            healthz: Watch::start(client, at(HEALTHZ), "/healthz"),
            service: Watch::start(client, at(HEALTH_PORT), "/"),
        };
        until("both ports say 200", PATIENCE, || watches.both() == [Some(200); 2]);
        watches
    }

    fn both(&self) -> [Option<u16>; 2] {
        [self.healthz.last(), self.service.last()]
    }

    fn wait_for(&self, what: &str, wanted: [Option<u16>; 2]) {
        until(what, PATIENCE, || self.both() == wanted);
    }
}

/// The watch itself works: among many answers it notices a single different one.
#[test]
fn a_single_answer_is_seen() {
    const SAID: [u16; 5] = [503, 200, 503, 204, 200];
    let cluster = cluster::without_agents(&[1], "tc");
    let node = cluster.lab.node(1);
    let at = cluster.at(1, Family::V4, HEALTH_PORT);
    let listener = node.netns().run(|| TcpListener::bind(at)).unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let ended = Arc::clone(&over);
    let server = spawn(move || {
        // The first answer is repeated twenty times, then each comes once, and the last for ever.
        let said = std::iter::repeat_n(SAID[0], 20).chain(SAID).chain(std::iter::repeat(SAID[4]));
        for (stream, status) in listener.incoming().zip(said) {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 1024]);
            // The client may be gone.
            let answer = format!("HTTP/1.1 {status} said\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            if stream.write_all(answer.as_bytes()).is_err() || ended.load(Ordering::Relaxed) {
                return;
            }
        }
    });
    let watch = Watch::start(cluster.lab.client().netns(), at, "/");
    let wanted = SAID.map(Some);
    until("each answer was seen", PATIENCE, || watch.statuses().len() >= wanted.len());
    assert_eq!(watch.statuses(), wanted);
    over.store(true, Ordering::Relaxed);
    until("the server has ended", PATIENCE, || server.is_finished());
}

#[test]
fn nobody_says_200_before_the_maps_are_checked() {
    let _alone = quiet::alone();
    let cluster = cluster::without_agents(&[1, 1], "tc");
    cluster.manifests.apply(&policy_local(), &cluster.backends()).unwrap();
    let mut agent = Agent::builder(&cluster.lab, cluster.lab.node(1)).start().unwrap();
    agent.wait_ready(PATIENCE).unwrap();

    // The shortest gap: the next agent finds all that it needs.
    let watches = Watches::start(&cluster);
    let stopping = Instant::now();
    agent.stop().unwrap();
    let stopped = stopping.elapsed();
    watches.wait_for("nobody answers", [None; 2]);
    let started = Instant::now();
    agent.start_again().unwrap();
    watches.wait_for("both ports say 200 again", [Some(200); 2]);
    let ([listens, healthy], [_, service]) = (watches.healthz.back(started), watches.service.back(started));
    println!(
        "the agent ends {stopped:?} after SIGTERM; of the next one /healthz answers {listens:?} after its start and says 200 \
         after {healthy:?}, a health-check port after {service:?}"
    );
    let statuses = watches.service.statuses();
    assert_eq!(statuses, [Some(200), None, Some(200)], "a health-check port");
    // The status is 503 while programs are loaded, unless no request fell into that time.
    let statuses = watches.healthz.statuses();
    let (up, loading) = ([Some(200), None, Some(200)], [Some(200), None, Some(503), Some(200)]);
    assert!(statuses == up || statuses == loading, "/healthz: {statuses:?}");
    drop(watches);

    // The node's endpoint is removed while no agent runs, and the next agent cannot read the
    // objects at first.
    let watches = Watches::start(&cluster);
    agent.stop().unwrap();
    watches.wait_for("nobody answers", [None; 2]);
    let elsewhere = [Backend::of(cluster.lab.node(2).pod(1))];
    cluster.manifests.endpoints(&policy_local(), &elsewhere).unwrap();
    let folder = cluster.manifests.folder().to_owned();
    let hidden = folder.with_extension("hidden");
    std::fs::rename(&folder, &hidden).unwrap();
    agent.start_again().unwrap();
    watches.wait_for("/healthz says 503, a health-check port nothing", [Some(503), None]);
    assert_eq!(agent.livez().unwrap().status, 200);
    // The maps of the previous agent show an endpoint here. They must not be trusted for as long as
    // this.
    sleep(Duration::from_secs(1));
    assert_eq!(watches.both(), [Some(503), None]);
    std::fs::rename(&hidden, &folder).unwrap();
    watches.wait_for("the maps are checked", [Some(200), Some(503)]);
    assert_eq!(watches.healthz.statuses(), [Some(200), None, Some(503), Some(200)], "/healthz");
    assert_eq!(watches.service.statuses(), [Some(200), None, Some(503)], "a health-check port");
}
