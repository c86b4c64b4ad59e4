//! `cargo xtask vm lab`: three machines as nodes, their agents on virtio cards by XDP in the
//! driver, a router, and a client.
//!
//! ```text
//!   client 192.0.2.10 ── router 172.18.0.1 ──┬── node-1 172.18.0.11  pod-1-1
//!     (a namespace)        (a namespace)     ├── node-2 172.18.0.12  pod-2-1, pod-2-2
//!                                            └── node-3 172.18.0.13  no pod
//! ```

use std::{
    ffi::OsStr,
    fs::File,
    path::PathBuf,
    process::{Child, Command, ExitCode, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use super::{
    AGENT, Built, Choice, Workshop, job,
    machine::Machine,
    root::Root,
    series::Wanted,
    wires::{Card, Namespace, Offloads, Wires, ip},
};
use crate::{cargo, setup::programs};

/// The number of pods of each node.
const PODS: [u8; 3] = [1, 2, 0];
/// The number of queue pairs of a node's card: with two processors, transmission by XDP needs two
/// more.
const QUEUES: u32 = 4;
/// The time limit for a node to become ready; an emulated one takes about a minute.
const PATIENCE: Duration = Duration::from_secs(400);

/// The time limit of a request in seconds: longer than the retransmission of a lost SYN and the
/// answer of an emulated machine take.
const LIMIT: &str = "6";

#[derive(Args)]
pub(super) struct Options {
    #[command(flatten)]
    choice: Choice,
    /// Attach mode of the agents
    #[arg(long, default_value = "xdp", value_parser = ["auto", "xdp", "xdp-generic", "tc"])]
    attach: String,
    /// Command to run as the client once all nodes are ready; the lab stops after it. Without one,
    /// it stays until Enter
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

pub(super) fn run(options: &Options) -> Result<ExitCode> {
    if !programs::prepare(&[("curl", "curl")], "there is no client").is_empty() {
        bail!("the client needs curl");
    }
    let workshop = options.choice.workshop(&[Wanted::Newest])?;
    let (root, built) = workshop.root_with_all()?;
    let lab = Lab::up(&workshop, &root, &built, &options.attach)?;
    lab.wait_ready()?;
    let as_expected = lab.show()?;
    if !options.command.is_empty() {
        let mut command = lab.client_command(&[lab.environment(&built), options.command.clone()].concat())?;
        let status = cargo::status(&mut command)?;
        ensure!(as_expected, "the nodes did not answer as the policies say");
        return Ok(cargo::code_of(status));
    }
    lab.explain();
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).context("reading standard input failed")?;
    ensure!(as_expected, "the nodes did not answer as the policies say");
    Ok(ExitCode::SUCCESS)
}

struct Lab {
    // The nodes are dropped before the namespaces that they are in.
    nodes: Vec<Node>,
    client: Namespace,
    wires: Wires,
    folder: PathBuf,
    started: Instant,
}

/// A machine that is stopped when this value is dropped.
struct Node {
    qemu: Child,
    console: PathBuf,
}

impl Lab {
    fn up(workshop: &Workshop, root: &Root, built: &Built, attach: &str) -> Result<Self> {
        let started = Instant::now();
        let id = format!("tp-vmlab-{}", std::process::id());
        let kernel = workshop.kernels.first().context("no kernel was named")?;
        let cards: Vec<Card> = (1..=PODS.len()).map(card).collect();
        let wires = Wires::make(&id, cards)?;
        let client = client(&wires, &format!("{id}-client"))?;
        let folder = workshop.folder.join(format!("runs/lab-{}", std::process::id()));
        let mut lab = Self { nodes: Vec::new(), client, wires, folder, started };
        for number in 1..=PODS.len() {
            println!("vm: node-{number} boots Linux {} …", kernel.release);
            let job = node_job(built, number, attach);
            let machine = Machine {
                devices: Wires::arguments(lab.wires.cards().get(number - 1)),
                netns: Some(lab.wires.netns.0.clone()),
                folder: lab.folder.join(format!("node-{number}")),
                ..Machine::new(workshop, kernel, root, job, "lab")
            };
            lab.nodes.push(Node::start(&machine)?);
        }
        Ok(lab)
    }

    /// Waits until every node's agent reports that its maps are in sync.
    fn wait_ready(&self) -> Result<()> {
        for (number, node) in (1..).zip(&self.nodes) {
            let url = format!("{}:10256/healthz", address(number));
            loop {
                if self.get(&url).is_ok_and(|(status, _)| status == 200) {
                    println!("vm: node-{number} is ready ({:.0} s)", self.started.elapsed().as_secs_f32());
                    break;
                }
                let late = self.started.elapsed() > PATIENCE;
                ensure!(!late, "node-{number} is not ready; its console ends with:\n{}", node.last_said());
                sleep(Duration::from_millis(500));
            }
        }
        Ok(())
    }

    /// Sends requests to every node under both policies, and prints which pods answer. Returns
    /// whether the answers are as expected.
    fn show(&self) -> Result<bool> {
        println!("\n  NODE    POLICY   ANSWERED BY                     HEALTH PORT");
        let mut right = true;
        for number in 1..=self.nodes.len() {
            for (policy, port) in [("Cluster", 30080), ("Local", 30081)] {
                let pods = self.answers(number, port);
                let expected: Vec<String> = (1..=PODS.len())
                    .filter(|node| policy == "Cluster" || *node == number)
                    .flat_map(|node| (1..=PODS[node - 1]).map(move |pod| format!("pod-{node}-{pod}")))
                    .collect();
                right &= pods == expected;
                let health = if policy == "Local" {
                    let (status, _) = self.get(&format!("{}:32081/", address(number)))?;
                    right &= status == if PODS[number - 1] > 0 { 200 } else { 503 };
                    status.to_string()
                } else {
                    String::new()
                };
                let said = if pods.is_empty() { "nobody: silence".to_owned() } else { pods.join(", ") };
                println!("  node-{number}  {policy:<7}  {said:<30}  {health}");
            }
        }
        Ok(right)
    }

    /// Returns the names of the pods that answer, in order.
    fn answers(&self, number: usize, port: u16) -> Vec<String> {
        let mut pods = std::collections::BTreeSet::new();
        // With three endpoints, one is never chosen in one of 10^5 runs.
        for _ in 0..32 {
            let Ok((_, body)) = self.get(&format!("{}:{port}/", address(number))) else { break };
            let name = body.split("\"pod\":\"").nth(1).and_then(|rest| rest.split('"').next());
            pods.extend(name.map(str::to_owned));
        }
        pods.into_iter().collect()
    }

    /// Sends an HTTP request as the client. Returns status and body; pods answer with a bare line,
    /// which has no status.
    fn get(&self, url: &str) -> Result<(u16, String)> {
        let words = ["curl", "--silent", "--show-error", "--http0.9", "--max-time", LIMIT];
        let words = [&words[..], &["--write-out", "\n%{http_code}", url]].concat();
        let mut command = self.client_command(&words)?;
        let output = command.output().context("nsenter cannot be started")?;
        if !output.status.success() {
            bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
        }
        let said = String::from_utf8_lossy(&output.stdout);
        let (body, status) = said.rsplit_once('\n').context("curl reports no status")?;
        Ok((status.parse()?, body.to_owned()))
    }

    fn client_command(&self, words: &[impl AsRef<OsStr>]) -> Result<Command> {
        let mut command = cargo::privileged("nsenter").context("neither root nor sudo")?;
        command.arg(format!("--net=/run/netns/{}", self.client.0)).args(words);
        Ok(command)
    }

    /// Returns the environment of a client's command, which describes the lab, as in
    /// `deploy/vagrant/stories.sh`.
    fn environment(&self, built: &Built) -> Vec<String> {
        let last = self.nodes.last().map_or(0, |node| node.qemu.id());
        let emulated = if built.arch.has_kvm() { None } else { Some("TIMEOUT=10".to_owned()) };
        let words = [
            "env".to_owned(),
            format!("POWER_OFF=kill -9 {last}"),
            format!("TRAFFIC_POLICY_AGENT={}", built.program(AGENT).display()),
        ];
        words.into_iter().chain(emulated).collect()
    }

    fn explain(&self) {
        let client = &self.client.0;
        println!("\nThe client is the network namespace {client}, the router {}.", self.wires.netns.0);
        println!("  nsenter --net=/run/netns/{client} curl -s http://{}:30080/", address(1));
        println!("Consoles of the nodes are in {}. Enter ends the lab.", self.folder.display());
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.nodes.clear();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Node {
    fn start(machine: &Machine<'_>) -> Result<Self> {
        let mut command = machine.command()?;
        let console = machine.folder.join("console.log");
        command.args(["-serial", &format!("file:{}", console.display())]);
        let errors = File::create(machine.folder.join("qemu.log"))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
        let qemu = command.spawn().context("qemu cannot be started")?;
        Ok(Self { qemu, console })
    }

    /// Returns the last lines of the console, which contains the agent's log.
    fn last_said(&self) -> String {
        let said = std::fs::read(&self.console).unwrap_or_default();
        let said = String::from_utf8_lossy(&said);
        let lines: Vec<_> = said.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

fn address(number: usize) -> String {
    format!("172.18.0.1{number}")
}

fn card(number: usize) -> Card {
    Card {
        tap: format!("node-{number}"),
        bridge: "lan".to_owned(),
        mac: format!("52:54:00:00:01:{number:02}"),
        queues: QUEUES,
        mtu: 1500,
        offloads: Offloads::On,
    }
}

/// Sets the router's addresses, and makes a client behind it.
fn client(wires: &Wires, name: &str) -> Result<Namespace> {
    let client = Namespace::make(name)?;
    for words in [
        "address add 172.18.0.1/24 dev lan",
        "address add fd00:172:18::1/64 dev lan nodad",
        "link add client type veth peer name eth0",
        "address add 192.0.2.1/24 dev client",
        "address add fd00:c::1/64 dev client nodad",
        "link set client up",
    ] {
        wires.inside(&words.split(' ').collect::<Vec<_>>())?;
    }
    wires.inside(&["link", "set", "eth0", "netns", name])?;
    for words in [
        "link set lo up",
        "link set eth0 up",
        "address add 192.0.2.10/24 dev eth0",
        "address add fd00:c::10/64 dev eth0 nodad",
        "route add default via 192.0.2.1",
        "-6 route add default via fd00:c::1",
    ] {
        let mut arguments = vec!["-netns", name];
        arguments.extend(words.split(' '));
        ip(&arguments)?;
    }
    let mut command = cargo::privileged("nsenter").context("neither root nor sudo")?;
    command.arg(format!("--net=/run/netns/{}", wires.netns.0));
    let sysctls = ["net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"];
    cargo::quietly(command.args(["sysctl", "-qw"]).args(sysctls))?;
    Ok(client)
}

fn node_job(built: &Built, number: usize, attach: &str) -> String {
    let pods = PODS.map(|pods| pods.to_string()).join(" ");
    let lab = job::quoted(&built.program("lab").display().to_string());
    format!(
        "{}cat >/run/manifests.sh <<'@@ end'\n{}@@ end\n\
         NUMBER={number} NODES={} PODS='{pods}' DEVICE=eth0 ROUTER4=172.18.0.1 ROUTER6=fd00:172:18::1 ATTACH={attach} \
         LAB_PROGRAM={lab} MANIFESTS_SCRIPT=/run/manifests.sh\n{}\ntail -f /run/agent.log\n",
        job::environment(built),
        include_str!("../../../deploy/vagrant/manifests.sh"),
        PODS.len(),
        include_str!("../../../deploy/vagrant/node.sh")
    )
}
