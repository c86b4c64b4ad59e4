//! A pod's container on a node of a lab, run by crun from the pod's own spec, as a kubelet and containerd would.

mod config;
mod hybrid;
mod root;
mod seccomp;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::{PodSpec, Probe};
use tempfile::TempDir;

pub use self::hybrid::hide as only_cgroup2;
pub use self::root::Root;
use crate::lab::{Lab, Node};
use crate::netns::{Namespace, Process};
use crate::pace::scaled;
use crate::traffic::http;

/// crun's folder for the state of test containers, apart from the machine's own.
const STATES: &str = "/run/traffic-policy-crun";

/// Folders and files of a node that pods mount.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// Folders of the lab, mounted in place of the node's.
    pub host: BTreeMap<String, PathBuf>,
    /// By name, as in the API.
    pub config_maps: BTreeMap<String, BTreeMap<String, String>>,
    /// The service account's files, as the kubelet mounts them: `token` and `ca.crt`.
    pub service_account: Option<PathBuf>,
}

/// A container; its process ends with this value.
#[derive(Debug)]
pub struct Container {
    id: String,
    netns: Namespace,
    process: Process,
    log: PathBuf,
    liveness: Option<Probe>,
    /// The program's name and arguments.
    entrypoint: Vec<String>,
    _bundle: TempDir,
}

impl Container {
    /// Whether there is a crun; otherwise it is said aloud that a test is skipped.
    pub fn can_run(test: &str) -> bool {
        let found = Command::new("crun").arg("--version").output();
        let found = found.is_ok_and(|output| output.status.success());
        if !found {
            // Past the test harness, which would keep it to itself.
            writeln!(std::io::stderr(), "SKIPPED {test}: there is no crun to run containers with").ok();
        }
        found
    }

    /// Starts a pod's only container on a node.
    ///
    /// # Errors
    /// The spec has something that is not understood here, or crun fails.
    pub fn start(lab: &Lab, node: &Node, pod: &PodSpec, around: &Surroundings) -> Result<Self> {
        remove_leftovers()?;
        let bundle = tempfile::tempdir()?;
        let root = Root::prepare(&bundle.path().join("rootfs"))?;
        let config = config::of(pod, &root, node, around)?;
        fs::write(bundle.path().join("config.json"), serde_json::to_vec_pretty(&config)?)?;
        let id = format!("{}-{}", lab.id(), node.name);
        let log = lab.logs().join(format!("{}-container.log", node.name));
        let out = File::create(&log)?;
        let mut command = crun()?;
        command.args(["run", "--bundle"]).arg(bundle.path()).arg(&id);
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        let process = node.netns().spawn(command)?;
        let liveness = pod.containers[0].liveness_probe.clone();
        let netns = node.netns().clone();
        Ok(Self { id, netns, process, log, liveness, entrypoint: root.entrypoint, _bundle: bundle })
    }

    /// Waits until its `/healthz` says 200. The limit is that of a fast machine.
    pub fn wait_ready(&mut self, limit: Duration) -> Result<()> {
        let (start, limit) = (Instant::now(), scaled(limit));
        let healthz = SocketAddr::from(([127, 0, 0, 1], 10256));
        loop {
            let answer = http::get_from(&self.netns, healthz, "/healthz");
            if answer.as_ref().is_ok_and(|answer| answer.status == 200) {
                return Ok(());
            }
            if let Some(status) = self.process.try_wait()? {
                bail!("{} ended, {status}:\n{}", self.id, self.log());
            }
            if start.elapsed() > limit {
                bail!("{} is not ready after {limit:?}: {answer:?}\n{}", self.id, self.log());
            }
            sleep(Duration::from_millis(20));
        }
    }

    /// Waits until it has printed this.
    pub fn wait_said(&mut self, text: &str, limit: Duration) -> Result<()> {
        let (start, limit) = (Instant::now(), scaled(limit));
        while !self.log().contains(text) {
            if let Some(status) = self.process.try_wait()? {
                bail!("{} ended, {status}:\n{}", self.id, self.log());
            }
            ensure!(start.elapsed() < limit, "{} does not say {text:?}\n{}", self.id, self.log());
            sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Waits until its process has ended by itself, and gives the exit code.
    pub fn wait_ended(&mut self, limit: Duration) -> Result<Option<i32>> {
        let (start, limit) = (Instant::now(), scaled(limit));
        loop {
            if let Some(status) = self.process.try_wait()? {
                return Ok(status.code());
            }
            ensure!(start.elapsed() < limit, "{} still runs\n{}", self.id, self.log());
            sleep(Duration::from_millis(20));
        }
    }

    /// The status that its liveness probe gets, asked as the kubelet asks: from the node, of the host that the probe names.
    pub fn probe(&self) -> Result<u16> {
        let probe = self.liveness.as_ref().context("it has no liveness probe")?;
        let get = probe.http_get.as_ref().context("its liveness probe asks by something else than HTTP")?;
        let host: IpAddr = get.host.as_deref().context("the probe names no host")?.parse()?;
        let k8s_openapi::apimachinery::pkg::util::intstr::IntOrString::Int(port) = &get.port else {
            bail!("the probe names its port")
        };
        let at = SocketAddr::new(host, u16::try_from(*port)?);
        Ok(http::get_from(&self.netns, at, get.path.as_deref().unwrap_or("/"))?.status)
    }

    /// As `kubectl exec POD -- traffic-policy-agent ARGUMENTS…`.
    pub fn exec(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = crun()?;
        command.arg("exec").arg(&self.id).args(&self.entrypoint).args(arguments);
        self.netns.output(command)
    }

    /// The output of a command with `--output json`.
    pub fn json(&self, arguments: &[&str]) -> Result<serde_json::Value> {
        let output = self.exec(&[arguments, &["--output", "json"]].concat())?;
        ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).with_context(|| format!("{arguments:?} prints no JSON"))
    }

    /// Number of packets that left the packet path at a hook with an outcome, as in `status`.
    pub fn packets(&self, hook: &str, outcome: &str) -> Result<u64> {
        let status = self.json(&["status"])?;
        let rows = status["counters"].as_array().context("status prints no counters")?;
        let row = rows.iter().find(|row| row["hook"] == hook && row["outcome"] == outcome);
        Ok(row.and_then(|row| row["packets"].as_u64()).unwrap_or(0))
    }

    /// The first process, as this machine numbers it.
    pub fn pid(&self) -> Result<u32> {
        let output = crun()?.arg("state").arg(&self.id).output()?;
        ensure!(output.status.success(), "crun state: {}", String::from_utf8_lossy(&output.stderr));
        let state: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let pid = state["pid"].as_u64().context("crun names no process")?;
        Ok(u32::try_from(pid)?)
    }

    /// As a kubelet ends a container: SIGTERM, and its process has to end by itself. Gives the exit code.
    pub fn stop(mut self) -> Result<Option<i32>> {
        let output = crun()?.args(["kill", &self.id, "TERM"]).output()?;
        ensure!(output.status.success(), "crun kill: {}", String::from_utf8_lossy(&output.stderr));
        self.wait_ended(Duration::from_secs(10))
    }

    /// All that it has printed so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the container {} said:\n{}\n---", self.id, self.log());
        }
        // Its process would outlive crun.
        delete(&self.id);
    }
}

fn crun() -> Result<Command> {
    let mut command = Command::new("crun");
    // Of cgroups, a test touches its own only.
    command.args(["--root", STATES, "--cgroup-manager", "disabled"]);
    hybrid::hide(&mut command)?;
    Ok(command)
}

/// A container that is gone already is no error.
fn delete(id: &str) {
    // Without a cgroup and process ids of the container's own, `delete --force` ends no process.
    for arguments in [["kill", id, "KILL"], ["delete", "--force", id]] {
        if let Ok(mut command) = crun() {
            command.args(arguments).output().ok();
        }
    }
}

/// Ends the containers of tests that were killed.
fn remove_leftovers() -> Result<()> {
    fs::create_dir_all(STATES).with_context(|| STATES.to_owned())?;
    for entry in fs::read_dir(STATES)?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let owner = name.strip_prefix("tp-").and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        if owner.is_some_and(|owner| !Path::new("/proc").join(owner.to_string()).exists()) {
            delete(&name);
        }
    }
    Ok(())
}
