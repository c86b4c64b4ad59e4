//! The agent on a node of a lab, started as a user would start it.

use std::env;
use std::fs::{self, File, OpenOptions};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;

use crate::exposition::Exposition;
use crate::lab::{Folder, Lab, Node};
use crate::netns::{Namespace, Process, is_running};
use crate::pace::{poll, scaled};
use crate::traffic::http::{self, Response};

const METRICS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 10249);
const HEALTHZ: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 10256);

/// Options of an agent that is not started yet. Each method adds one flag.
#[derive(Clone, Debug)]
pub struct AgentBuilder {
    program: Option<PathBuf>,
    attach: String,
    cgroup: String,
    devices: Vec<String>,
    /// The flag that names the source of objects, and its path; `None` if a `--config` file names
    /// it.
    source: Option<(&'static str, PathBuf)>,
    /// Whether the flag `--node-name` is given.
    named: bool,
    pin_dir: PathBuf,
    extra: Vec<String>,
    environment: Vec<(String, String)>,
    log: PathBuf,
    node: String,
    netns: Namespace,
}

/// A running agent, killed when dropped. Its pins stay in the lab's bpffs, as on a real node.
#[derive(Debug)]
pub struct Agent {
    how: AgentBuilder,
    process: Option<Process>,
}

impl Agent {
    /// Returns a builder with the defaults of tests: `--cgroup none` (never the machine's own!),
    /// `--attach tc` on `eth0`, the lab's manifests, and a pin folder of this node alone.
    pub fn builder(lab: &Lab, node: &Node) -> AgentBuilder {
        Self::in_folder(lab.folder(), &node.name, node.netns())
    }

    /// A variant of [`Self::builder`] for a node that belongs to no lab.
    pub fn in_folder(folder: &Folder, node: &str, netns: &Namespace) -> AgentBuilder {
        AgentBuilder {
            program: None,
            attach: "tc".to_owned(),
            cgroup: "none".to_owned(),
            devices: vec!["eth0".to_owned()],
            source: Some(("--manifests", folder.manifests())),
            named: true,
            pin_dir: folder.bpffs().join(node),
            extra: Vec::new(),
            environment: Vec::new(),
            log: folder.logs().join(format!("{node}.log")),
            node: node.to_owned(),
            netns: netns.clone(),
        }
    }

    /// Starts one agent on each node and waits until all are ready. A test of what one node does
    /// takes [`Self::start_first`], because each start costs most of a second of a CPU.
    pub fn start_all(lab: &Lab, adapt: impl Fn(AgentBuilder) -> AgentBuilder) -> Result<Vec<Self>> {
        Self::start_on(lab.nodes(), lab, adapt)
    }

    /// Starts agents on the first `count` nodes, in order, and waits until all are ready. The other
    /// nodes only route to their pods.
    pub fn start_first(
        count: usize,
        lab: &Lab,
        adapt: impl Fn(AgentBuilder) -> AgentBuilder,
    ) -> Result<Vec<Self>> {
        Self::start_on(&lab.nodes()[..count], lab, adapt)
    }

    fn start_on(
        nodes: &[Node],
        lab: &Lab,
        adapt: impl Fn(AgentBuilder) -> AgentBuilder,
    ) -> Result<Vec<Self>> {
        let start = |node| adapt(Self::builder(lab, node)).start();
        let agents: Vec<_> = nodes.iter().map(start).collect::<Result<_>>()?;
        agents.iter().try_for_each(|agent| agent.wait_ready(Duration::from_secs(20)))?;
        Ok(agents)
    }

    /// Waits until /healthz answers 200. The limit is that of a fast machine, as in the waits
    /// below.
    pub fn wait_ready(&self, limit: Duration) -> Result<()> {
        let start = Instant::now();
        let mut answer = String::new();
        let state = poll(limit, || {
            answer = match self.healthz() {
                Ok(response) if response.status == 200 => return Some("is ready"),
                Ok(response) => format!("status {}", response.status),
                Err(error) => format!("{error:#}"),
            };
            (!self.is_running()).then_some("ended")
        });
        let (name, took, state) = (&self.how.node, start.elapsed(), state.unwrap_or("is not ready"));
        ensure!(state == "is ready", "the agent of {name} {state} after {took:?}: {answer}\n{}", self.log());
        Ok(())
    }

    /// Waits until the agent has exited by itself, and returns its exit code.
    pub fn wait_ended(&mut self, limit: Duration) -> Result<Option<i32>> {
        let process = self.process.as_mut().context("no agent is running")?;
        let ended = poll(limit, || process.try_wait().transpose());
        let status =
            ended.with_context(|| format!("the agent of {} still runs\n{}", self.how.node, self.log()))??;
        self.process = None;
        Ok(status.code())
    }

    /// Waits until the agent has printed a line that contains all of `texts`, and returns that
    /// line.
    pub fn wait_said(&self, texts: &[&str], limit: Duration) -> Result<String> {
        let line = poll(limit, || {
            let log = self.log();
            log.lines().find(|line| texts.iter().all(|text| line.contains(text))).map(str::to_owned)
        });
        line.with_context(|| {
            let (name, limit) = (&self.how.node, scaled(limit));
            format!("the agent of {name} did not say {texts:?} within {limit:?}\n{}", self.log())
        })
    }

    /// The number of packets that left the packet path at a hook (`xdp`, `ingress`, `egress`) with
    /// an outcome, as `status` counts them.
    pub fn packets(&self, hook: &str, outcome: &str) -> Result<u64> {
        let status = self.json(&["status"])?;
        let rows = status["counters"].as_array().context("status prints no counters")?;
        let row = rows.iter().find(|row| row["hook"] == hook && row["outcome"] == outcome);
        Ok(row.and_then(|row| row["packets"].as_u64()).unwrap_or(0))
    }

    /// All counts of packets, a line for each hook and outcome.
    fn counters(&self) -> String {
        let status = match self.json(&["status"]) {
            Ok(status) => status,
            Err(error) => return format!("{error:#}"),
        };
        let rows = status["counters"].as_array().into_iter().flatten();
        let line = |row: &serde_json::Value| {
            let word = |name: &str| row[name].as_str().unwrap_or("?").to_owned();
            format!("{:11} {:28} {}", word("hook"), word("outcome"), row["packets"])
        };
        rows.map(line).collect::<Vec<_>>().join("\n")
    }

    pub fn healthz(&self) -> Result<Response> {
        http::get_from(&self.how.netns, HEALTHZ, "/healthz")
    }

    pub fn livez(&self) -> Result<Response> {
        http::get_from(&self.how.netns, HEALTHZ, "/livez")
    }

    pub fn readyz(&self) -> Result<Response> {
        http::get_from(&self.how.netns, HEALTHZ, "/readyz")
    }

    /// Requests a path from the metrics port, which is the default one.
    pub fn ask_metrics(&self, path: &str) -> Result<Response> {
        http::get_from(&self.how.netns, METRICS, path)
    }

    /// Scrapes the metrics.
    pub fn scrape(&self) -> Result<Exposition> {
        let response = self.ask_metrics("/metrics")?;
        ensure!(response.status == 200, "/metrics: {} {}", response.status, response.body);
        Exposition::parse(&response.body)
    }

    pub fn is_running(&self) -> bool {
        self.pid().is_some_and(is_running)
    }

    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Process::id)
    }

    /// Sends SIGKILL.
    pub fn kill(&mut self) -> Result<()> {
        let mut process = self.process.take().context("no agent is running")?;
        process.kill().map(drop)
    }

    /// Sends SIGTERM and waits until the agent has exited.
    pub fn stop(&mut self) -> Result<()> {
        let mut process = self.process.take().context("no agent is running")?;
        process.signal(Signal::SIGTERM)?;
        let ended = poll(Duration::from_secs(10), || process.try_wait().transpose());
        let late = || format!("the agent of {} did not end on SIGTERM\n{}", self.how.node, self.log());
        ended.with_context(late)?.map(drop)
    }

    /// Starts the agent again after [`Self::kill`] or [`Self::stop`], with the same command line.
    pub fn start_again(&mut self) -> Result<()> {
        ensure!(self.process.is_none(), "the agent of {} is still running", self.how.node);
        self.process = Some(self.how.spawn()?);
        Ok(())
    }

    /// Runs another command of the agent on the same node: `status`, `flows`, `explain …`.
    pub fn command(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = self.how.command()?;
        command.args(arguments).env("TRAFFIC_POLICY_PIN_DIR", &self.how.pin_dir);
        self.how.netns.output(command)
    }

    /// The output of a command with `--output json`.
    pub fn json(&self, arguments: &[&str]) -> Result<serde_json::Value> {
        let output = self.command(&[arguments, &["--output", "json"]].concat())?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{arguments:?}: {said}");
        serde_json::from_slice(&output.stdout).with_context(|| format!("{arguments:?} prints no JSON"))
    }

    /// The findings of `check` on the same node, with the pin folder of this agent.
    pub fn check(&self) -> Result<Vec<serde_json::Value>> {
        let output = self.command(&["check", "--output", "json"])?;
        // The exit code is not checked: `check` fails if it finds an error.
        serde_json::from_slice(&output.stdout)
            .with_context(|| format!("check: {}", String::from_utf8_lossy(&output.stderr)))
    }

    /// Starts another command of the agent on the same node, with its output in a file.
    pub fn start_command(&self, arguments: &[&str], out: File) -> Result<Process> {
        let mut command = self.how.command()?;
        command.args(arguments).env("TRAFFIC_POLICY_PIN_DIR", &self.how.pin_dir);
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        self.how.netns.spawn(command)
    }

    /// All output of the agent so far, including that before a restart.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.how.log).unwrap_or_default()
    }

    pub fn pin_dir(&self) -> &Path {
        &self.how.pin_dir
    }
}

impl AgentBuilder {
    /// Uses another binary than that of [`program`].
    pub fn program(mut self, path: &Path) -> Self {
        self.program = Some(path.to_owned());
        self
    }

    /// Sets the attach mode: `auto`, `xdp`, `xdp-generic` or `tc`.
    pub fn attach(mut self, mode: &str) -> Self {
        self.attach = mode.to_owned();
        self
    }

    /// Attaches the socket programs to this cgroup.
    pub fn cgroup(mut self, cgroup: &Path) -> Self {
        self.cgroup = cgroup.display().to_string();
        self
    }

    pub fn devices(mut self, devices: &[&str]) -> Self {
        self.devices = devices.iter().map(|device| (*device).to_owned()).collect();
        self
    }

    pub fn manifests(mut self, folder: &Path) -> Self {
        self.source = Some(("--manifests", folder.to_owned()));
        self
    }

    /// Makes the agent follow an API server instead of a folder.
    pub fn kubeconfig(mut self, file: &Path) -> Self {
        self.source = Some(("--kubeconfig", file.to_owned()));
        self
    }

    /// Leaves out the flags that name the source of objects.
    pub fn without_source(mut self) -> Self {
        self.source = None;
        self
    }

    /// Leaves out `--node-name`.
    pub fn without_name(mut self) -> Self {
        self.named = false;
        self
    }

    pub fn pin_dir(mut self, folder: &Path) -> Self {
        self.pin_dir = folder.to_owned();
        self
    }

    /// Adds further flags.
    pub fn flags(mut self, flags: &[&str]) -> Self {
        self.extra.extend(flags.iter().map(|flag| (*flag).to_owned()));
        self
    }

    pub fn environment(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts the agent and does not wait until it is ready.
    pub fn start(self) -> Result<Agent> {
        let process = self.spawn()?;
        Ok(Agent { how: self, process: Some(process) })
    }

    /// The command line, as a user would type it.
    pub fn command_line(&self) -> Vec<String> {
        let mut words = vec!["run".to_owned()];
        if self.named {
            words.extend(["--node-name".to_owned(), self.node.clone()]);
        }
        for device in &self.devices {
            words.extend(["--device".to_owned(), device.clone()]);
        }
        if let Some((flag, path)) = &self.source {
            words.extend([(*flag).to_owned(), path.display().to_string()]);
        }
        words.extend(["--pin-dir".to_owned(), self.pin_dir.display().to_string()]);
        words.extend(["--cgroup", &self.cgroup, "--attach", &self.attach].map(str::to_owned));
        words.extend(self.extra.iter().cloned());
        words
    }

    fn command(&self) -> Result<Command> {
        Ok(Command::new(self.program.clone().map_or_else(program, Ok)?))
    }

    fn spawn(&self) -> Result<Process> {
        let log = OpenOptions::new().create(true).append(true).open(&self.log);
        let log: File = log.with_context(|| format!("opening {}", self.log.display()))?;
        let mut command = self.command()?;
        command.args(self.command_line()).envs(self.environment.iter().cloned());
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.netns.spawn(command)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // Log and maps are removed with the lab, and a failed test cannot be understood without
        // them.
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<_> = log.lines().collect();
            let tail = &lines[lines.len().saturating_sub(40)..];
            eprintln!("--- the agent of {} said:\n{}", self.how.node, tail.join("\n"));
            eprintln!("--- its packets:\n{}\n---", self.counters());
        }
    }
}

/// The path of the agent's binary: `TRAFFIC_POLICY_AGENT`, or the binary next to this test in the
/// target folder.
pub fn program() -> Result<PathBuf> {
    if let Some(path) = env::var_os("TRAFFIC_POLICY_AGENT") {
        return Ok(path.into());
    }
    let own = env::current_exe()?;
    let found = own.ancestors().skip(1).take(2).map(|folder| folder.join("traffic-policy-agent"));
    let found = found.into_iter().find(|path| path.is_file());
    found.context("no traffic-policy-agent: build it (`cargo build -p traffic-policy-agent`) or set TRAFFIC_POLICY_AGENT")
}
