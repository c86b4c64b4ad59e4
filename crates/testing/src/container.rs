//! A pod's container on a node of a lab, run by crun from the pod's own spec, as a kubelet and
//! containerd would run it.

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

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::{PodSpec, Probe};
use tempfile::TempDir;

pub use self::hybrid::hide as only_cgroup2;
pub use self::root::Root;
use crate::lab::{Lab, Node};
use crate::netns::{Namespace, Process};
use crate::pace::{poll, scaled};
use crate::traffic::http;

/// The folder of crun for the state of test containers, separate from the machine's own.
const STATES: &str = "/run/traffic-policy-crun";

/// Folders and files of a node that pods mount.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// Folders of the lab, mounted in place of the node's.
    pub host: BTreeMap<String, PathBuf>,
    /// ConfigMaps by name, as in the API.
    pub config_maps: BTreeMap<String, BTreeMap<String, String>>,
    /// The files of the service account, as the kubelet mounts them: `token` and `ca.crt`.
    pub service_account: Option<PathBuf>,
}

/// A container; its process is ended when it is dropped.
#[derive(Debug)]
pub struct Container {
    id: String,
    netns: Namespace,
    process: Process,
    log: PathBuf,
    liveness: Option<Probe>,
    /// The name of the program, and its arguments.
    entrypoint: Vec<String>,
    _bundle: TempDir,
}

impl Container {
    /// Whether crun is installed; otherwise prints that the test is skipped.
    pub fn can_run(test: &str) -> bool {
        let found = Command::new("crun").arg("--version").output();
        let found = found.is_ok_and(|output| output.status.success());
        if !found {
            // Written to stderr directly: the test harness would capture it otherwise.
            writeln!(std::io::stderr(), "SKIPPED {test}: there is no crun to run containers with").ok();
        }
        found
    }

    /// Starts a pod's only container on a node.
    ///
    /// # Errors
    /// The spec has a field that is not supported here, or crun fails.
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

    /// Waits until `/healthz` of the container answers 200. The limit is that of a fast machine.
    pub fn wait_ready(&mut self, limit: Duration) -> Result<()> {
        let healthz = SocketAddr::from(([127, 0, 0, 1], 10256));
        let netns = self.netns.clone();
        let mut answer = None;
        let is_ready = self.wait_while_it_runs(limit, |_| {
            let said = answer.insert(http::get_from(&netns, healthz, "/healthz"));
            said.as_ref().is_ok_and(|said| said.status == 200)
        })?;
        ensure!(is_ready, "{} is not ready after {:?}: {answer:?}\n{}", self.id, scaled(limit), self.log());
        Ok(())
    }

    /// Waits until something holds; returns false after the time limit. Fails if the container
    /// ends.
    fn wait_while_it_runs(&mut self, limit: Duration, mut holds: impl FnMut(&Self) -> bool) -> Result<bool> {
        let ended = poll(limit, || {
            if holds(self) {
                return Some(Ok(None));
            }
            self.process.try_wait().map(|status| status.map(Some)).transpose()
        });
        match ended.transpose()? {
            Some(Some(status)) => bail!("{} ended, {status}:\n{}", self.id, self.log()),
            Some(None) => Ok(true),
            None => Ok(false),
        }
    }

    /// Waits until the container has printed this text.
    pub fn wait_said(&mut self, text: &str, limit: Duration) -> Result<()> {
        let has_said = self.wait_while_it_runs(limit, |container| container.log().contains(text))?;
        ensure!(has_said, "{} does not say {text:?}\n{}", self.id, self.log());
        Ok(())
    }

    /// Waits until the process has exited by itself, and returns the exit code.
    pub fn wait_ended(&mut self, limit: Duration) -> Result<Option<i32>> {
        let ended = poll(limit, || self.process.try_wait().transpose());
        let status = ended.with_context(|| format!("{} still runs\n{}", self.id, self.log()))??;
        Ok(status.code())
    }

    /// The status that the liveness probe gets, sent as the kubelet sends it: from the node, to the
    /// host that the probe names.
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

    /// Runs a command as `kubectl exec POD -- traffic-policy-agent ARGUMENTS…` does.
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

    /// The number of packets that left the packet path at a hook with an outcome, as `status`
    /// counts them.
    pub fn packets(&self, hook: &str, outcome: &str) -> Result<u64> {
        let status = self.json(&["status"])?;
        let rows = status["counters"].as_array().context("status prints no counters")?;
        let row = rows.iter().find(|row| row["hook"] == hook && row["outcome"] == outcome);
        Ok(row.and_then(|row| row["packets"].as_u64()).unwrap_or(0))
    }

    /// The first process, by its pid on this machine.
    pub fn pid(&self) -> Result<u32> {
        let output = crun()?.arg("state").arg(&self.id).output()?;
        ensure!(output.status.success(), "crun state: {}", String::from_utf8_lossy(&output.stderr));
        let state: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let pid = state["pid"].as_u64().context("crun names no process")?;
        Ok(u32::try_from(pid)?)
    }

    /// Stops the container as a kubelet does: by SIGTERM, upon which its process has to exit by
    /// itself. Returns the exit code.
    pub fn stop(mut self) -> Result<Option<i32>> {
        let output = crun()?.args(["kill", &self.id, "TERM"]).output()?;
        ensure!(output.status.success(), "crun kill: {}", String::from_utf8_lossy(&output.stderr));
        self.wait_ended(Duration::from_secs(10))
    }

    /// All output of the container so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the container {} said:\n{}\n---", self.id, self.log());
        }
        // The process would outlive crun.
        delete(&self.id);
    }
}

fn crun() -> Result<Command> {
    let mut command = Command::new("crun");
    // A test touches no cgroups but its own.
    command.args(["--root", STATES, "--cgroup-manager", "disabled"]);
    hybrid::hide(&mut command)?;
    Ok(command)
}

/// Deletes a container; one that is gone already is not an error.
fn delete(id: &str) {
    // Without a cgroup and a pid namespace of the container's own, `delete --force` ends no
    // process.
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
