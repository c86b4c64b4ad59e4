//! `monitor` names refused packets, the reason and the remedy; events are rate-limited; and packets
//! cost no more while it does not run.

use std::fs::File;
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cgroup::Cgroup;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::netns::Process;
use traffic_policy_testing::object::{Policy, lease};
use traffic_policy_testing::pace::{poll, until};
use traffic_policy_testing::pinned;
use traffic_policy_testing::traffic::Outcome;

const SOON: Duration = Duration::from_secs(20);

/// A Service whose only endpoint is on node-2, with requests to node-1.
fn cluster() -> (Cluster, Agent) {
    let cluster = Cluster::start(Lab::builder().pods(&[0, 1])).unwrap();
    let backends = cluster.backends();
    cluster.manifests.apply(&Cluster::node_port("far", Policy::Local, 30080), &backends).unwrap();
    cluster.manifests.apply(&Cluster::node_port("web", Policy::Cluster, 30081), &backends).unwrap();
    cluster.manifests.apply(&Cluster::node_port("none", Policy::Cluster, 30082), &[]).unwrap();
    let direct = Cluster::node_port("direct", Policy::Cluster, 30083)
        .annotation("traffic-policy.io/forwarding", "direct");
    cluster.manifests.apply(&direct, &backends).unwrap();
    cluster.manifests.write("lease", &[lease::opens(cluster.lab.node(2), &Family::BOTH)]).unwrap();
    let agent = Agent::builder(&cluster.lab, cluster.lab.node(1)).attach("tc").start().unwrap();
    agent.wait_ready(SOON).unwrap();
    (cluster, agent)
}

/// Nobody opens what is forwarded to node-2: a request has no answer.
#[test]
fn of_what_is_forwarded_directly() {
    let (cluster, agent) = cluster();
    let client = cluster.lab.client().address(Family::V4).to_string();
    let arguments = ["--outcome", "forwarded-direct", "--service", "direct", "--count", "1"];
    let monitor = Monitor::start(&cluster, &agent, &arguments);
    let ask = || drop(cluster.ask(Protocol::Udp, cluster.at(1, Family::V4, 30083)));
    let text = monitor.wait_ended(ask).join("\n");
    assert!(text.contains(&format!("forwarded-direct           UDP {client}:")), "{text}");
}

#[test]
fn of_packets_with_an_agent_and_without() {
    let (cluster, mut agent) = cluster();
    names_service_policy_reason_and_fix(&cluster, &agent);
    one_at_a_time_and_a_killed_one_costs_nothing(&cluster, &agent);
    a_flood_is_limited_and_counted(&cluster, &agent);
    agent.kill().unwrap();
    without_an_agent(&cluster, &agent);
}

struct Monitor {
    process: Process,
    out: PathBuf,
}

impl Monitor {
    fn start(cluster: &Cluster, agent: &Agent, arguments: &[&str]) -> Self {
        let out = cluster.lab.logs().join("monitor");
        let file = File::create(&out).unwrap();
        let process = agent.start_command(&[&["monitor"], arguments].concat(), file).unwrap();
        Self { process, out }
    }

    fn lines(&self) -> Vec<String> {
        std::fs::read_to_string(&self.out).unwrap().lines().map(str::to_owned).collect()
    }

    /// Repeats `happen` until the monitor has exited by itself.
    fn wait_ended(mut self, mut happen: impl FnMut()) -> Vec<String> {
        let ended = poll(SOON, || {
            let ended = self.process.try_wait().unwrap();
            if ended.is_none() {
                happen();
            }
            ended
        });
        assert!(ended.is_some(), "monitor goes on: {:?}", self.lines());
        self.lines()
    }

    /// Repeats `happen` until the monitor has printed a line.
    fn wait_line(&self, mut happen: impl FnMut()) {
        until("a line of monitor", SOON, || {
            happen();
            !self.lines().is_empty()
        });
    }
}

fn monitor_until(pins: &Path) -> u64 {
    let state = pinned::maps(pins).unwrap()["tp_config"].values().next().unwrap().clone();
    let at = std::mem::offset_of!(traffic_policy_ebpf::abi::RuntimeConfig, monitor_until);
    u64::from_ne_bytes(state[at..at + 8].try_into().unwrap())
}

fn names_service_policy_reason_and_fix(cluster: &Cluster, agent: &Agent) {
    let ask =
        |family, number: u16| cluster.ask(Protocol::Udp, cluster.at(1, family, 30080 + number)).unwrap();
    for family in Family::BOTH {
        let monitor = Monitor::start(
            cluster,
            agent,
            &["--output", "json", "--drops", "--service", "far", "--count", "1"],
        );
        let lines = monitor.wait_ended(|| {
            assert_eq!(ask(family, 0), Outcome::Silent);
            // Events that concern neither the Service nor a drop.
            ask(family, 1).answer().unwrap();
            assert!(ask(family, 2).is_refused_at_once());
        });
        let event: Value = serde_json::from_str(&lines[0]).unwrap();
        assert_eq!(event["outcome"], "dropped-no-local-endpoint");
        assert_eq!(event["service"], "default/far:udp-80");
        assert_eq!((&event["kind"], &event["policy"]), (&"NodePort".into(), &"Local".into()));
        assert_eq!(event["frontend"], cluster.at(1, family, 30080).to_string());
        let client: std::net::SocketAddr = event["client"].as_str().unwrap().parse().unwrap();
        assert_eq!(client.ip(), cluster.lab.client().address(family));
        assert_eq!((&event["hook"], &event["device"]), (&"tc-ingress".into(), &"eth0".into()));
        assert!(
            event["reason"]
                .as_str()
                .unwrap()
                .contains("Service default/far has externalTrafficPolicy: Local")
        );
        assert!(event["fix"].as_str().unwrap().contains("healthCheckNodePort"));
        assert!(event["time"].as_str().unwrap().ends_with('Z'));
        let last: Value = serde_json::from_str(lines.last().unwrap()).unwrap();
        assert_eq!((&last["shown"], &last["suppressed"]), (&1.into(), &0.into()));
    }

    // A new flow and a reject, in readable form.
    let client = cluster.lab.client().address(Family::V4).to_string();
    let monitor =
        Monitor::start(cluster, agent, &["--client", &client, "--outcome", "forwarded", "--count", "1"]);
    let text = monitor.wait_ended(|| drop(ask(Family::V4, 1).answer().unwrap())).join("\n");
    let pod = cluster.lab.node(2).pod(1).address(Family::V4);
    assert!(text.contains(&format!("forwarded                  UDP {client}:")), "{text}");
    assert!(text.contains(&format!(" → {pod}:8080  default/web:udp-80 (NodePort, Cluster)")), "{text}");
    let monitor = Monitor::start(cluster, agent, &["--outcome", "rejected-no-endpoint", "--count", "1"]);
    let text = monitor.wait_ended(|| assert!(ask(Family::V4, 2).is_refused_at_once())).join("\n");
    assert!(text.contains("default/none:udp-80"), "{text}");
    assert!(text.contains("    why: Service default/none has no endpoint"), "{text}");
    assert!(text.contains("    fix: see whether its pods are ready"), "{text}");
    assert_eq!(monitor_until(agent.pin_dir()), 0, "whoever ends says so");
}

fn a_flood_is_limited_and_counted(cluster: &Cluster, agent: &Agent) {
    const FLOOD: u64 = 30_000;
    let to = cluster.at(1, Family::V4, 30080);
    let dropped = |port: &Value| port["counts"]["dropped-no-local-endpoint"]["packets"].as_u64().unwrap_or(0);
    let all_dropped = || -> u64 {
        let ports = agent.json(&["services", "far"]).unwrap();
        ports.as_array().unwrap().iter().map(dropped).sum()
    };
    let before = all_dropped();
    let monitor = Monitor::start(cluster, agent, &["--output", "json", "--drops", "--for", "4s"]);
    let start = Instant::now();
    monitor.wait_line(|| assert_eq!(cluster.ask(Protocol::Udp, to).unwrap(), Outcome::Silent));
    cluster.lab.client().netns().run(|| {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.connect(to).unwrap();
        for _ in 0..FLOOD {
            socket.send(b"anybody?").unwrap();
        }
    });
    let lines = monitor.wait_ended(|| ());
    let took = start.elapsed().as_secs_f64();
    let last: Value = serde_json::from_str(lines.last().unwrap()).unwrap();
    let (shown, suppressed) = (last["shown"].as_u64().unwrap(), last["suppressed"].as_u64().unwrap());
    assert_eq!(lines.len() as u64, shown + 1);
    let cpus = std::thread::available_parallelism().unwrap().get() as f64;
    assert!((shown as f64) < cpus * (1_000.0 * took + 129.0), "{shown} events in {took} s on {cpus} CPUs");
    let counted = all_dropped() - before;
    let told = shown + suppressed;
    assert!((FLOOD..=counted).contains(&told), "{shown} shown, {suppressed} suppressed, {counted} dropped");
    assert!(suppressed > FLOOD / 2, "{suppressed} suppressed in {took} s");
}

fn one_at_a_time_and_a_killed_one_costs_nothing(cluster: &Cluster, agent: &Agent) {
    let to = cluster.at(1, Family::V4, 30080);
    assert_eq!(monitor_until(agent.pin_dir()), 0, "nobody listens");
    let mut monitor = Monitor::start(cluster, agent, &["--output", "json"]);
    monitor.wait_line(|| assert_eq!(cluster.ask(Protocol::Udp, to).unwrap(), Outcome::Silent));
    assert_ne!(monitor_until(agent.pin_dir()), 0);
    let second = agent.command(&["monitor", "--for", "1s"]).unwrap();
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert_eq!(second.status.code(), Some(1), "{said}");
    assert!(said.contains("another `monitor` is running"), "{said}");

    monitor.process.kill().unwrap();
    // The request of the monitor expires within 2 s; the agent's next sweep removes it altogether.
    until("the packet path to look at the clock no more", Duration::from_secs(10), || {
        monitor_until(agent.pin_dir()) == 0
    });
    assert_eq!(cluster.ask(Protocol::Udp, to).unwrap(), Outcome::Silent);
    let output = agent.command(&["monitor", "--output", "json", "--for", "200ms"]).unwrap();
    let last: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&last["shown"], &last["suppressed"]),
        (&0.into(), &0.into()),
        "nothing was written meanwhile"
    );
}

fn without_an_agent(cluster: &Cluster, agent: &Agent) {
    let to = cluster.at(1, Family::V4, 30080);
    let monitor = Monitor::start(cluster, agent, &["--output", "json", "--count", "1"]);
    let lines = monitor.wait_ended(|| assert_eq!(cluster.ask(Protocol::Udp, to).unwrap(), Outcome::Silent));
    let event: Value = serde_json::from_str(&lines[0]).unwrap();
    assert_eq!(event["service"], "default/far:udp-80");
}

#[test]
fn sockets_tell_too() {
    let cgroup = Cgroup::create("tp-monitor").unwrap();
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    cluster.manifests.apply(&Cluster::node_port("web", Policy::Cluster, 30081), &cluster.backends()).unwrap();
    cluster.manifests.apply(&Cluster::node_port("none", Policy::Cluster, 30082), &[]).unwrap();
    let agent = Agent::start_all(&cluster.lab, |agent| agent.cgroup(cgroup.path())).unwrap().remove(0);
    // A process of the node, in the cgroup.
    let connect = |port: u16| {
        let to = cluster.at(1, Family::V4, port);
        let procs = cgroup.path().join("cgroup.procs");
        let script = format!("echo $$ > {} && exec 3<>/dev/tcp/{}/{}", procs.display(), to.ip(), to.port());
        let mut command = Command::new("bash");
        command.args(["-c", &script]);
        cluster.lab.node(1).netns().output(command).unwrap().status.success()
    };
    let told = |outcome: &str, happen: &dyn Fn()| -> Value {
        let arguments = ["--output", "json", "--count", "1", "--outcome", outcome];
        let lines = Monitor::start(&cluster, &agent, &arguments).wait_ended(happen);
        serde_json::from_str(&lines[0]).unwrap()
    };
    let event = told("connected", &|| assert!(connect(30081)));
    assert_eq!((&event["hook"], &event["service"]), (&"socket".into(), &"default/web:tcp-80".into()));
    let pod = cluster.lab.node(1).pod(1).address(Family::V4);
    assert_eq!(event["endpoint"], format!("{pod}:8080"));
    assert_eq!((&event["device"], &event["client"]), (&Value::Null, &Value::Null));
    assert!(event["netns"].as_u64().unwrap() > 0);
    let event = told("rejected-no-endpoint", &|| assert!(!connect(30082)));
    assert_eq!((&event["hook"], &event["service"]), (&"socket".into(), &"default/none:tcp-80".into()));
    assert!(event["reason"].as_str().unwrap().contains("the call failed at once"), "{event}");

    let before = agent.packets("socket", "connected").unwrap();
    assert!(connect(30081));
    assert_eq!(agent.packets("socket", "connected").unwrap(), before + 1);
    let ports = agent.json(&["services", "web"]).unwrap();
    let counted = |port: &Value| port["counts"]["connected"]["packets"].as_u64().unwrap_or(0);
    assert_eq!(ports.as_array().unwrap().iter().map(counted).sum::<u64>(), before + 1, "{ports}");
    let status = agent.json(&["status"]).unwrap();
    let attached = status["attached"].as_array().unwrap();
    let hooks = attached.iter().filter(|link| link["present"] == true && link["hook"] == "cgroup connect4");
    assert_eq!(hooks.count(), 1, "{status}");
}
