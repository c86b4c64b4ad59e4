//! A real kube-proxy, if the environment names one: it then writes the rules, from the small API
//! server of the tests.

use std::{
    env,
    fs::{self, File},
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    process::{Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};
use traffic_policy_testing::{api_server::ApiServer, netns::Process};

use super::{fixture::WireTestbed, services::NODE_NAME};

/// Environment variable that names the program.
pub(crate) const VARIABLE: &str = "KUBE_PROXY";
/// Time limit for all rules.
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the program, if it is named.
pub(crate) fn program() -> Option<PathBuf> {
    env::var_os(VARIABLE).map(PathBuf::from)
}

/// A running kube-proxy, and the API server that it follows.
pub(crate) struct KubeProxy {
    _process: Process,
    _server: ApiServer,
    _runtime: Runtime,
}

impl KubeProxy {
    /// Starts it on the node, with `mode` as in `--proxy-mode`, and waits until the program of
    /// `listing` shows the rules of the flooded Service. The rules of all Services come in one
    /// transaction.
    pub(crate) fn start(
        fixture: &WireTestbed,
        mode: &str,
        objects: Vec<Value>,
        listing: &[&str],
    ) -> Result<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let server = {
            let _inside = runtime.enter();
            ApiServer::start_in(&fixture.node, SocketAddr::from((Ipv4Addr::LOCALHOST, 6443)))?
        };
        objects.into_iter().try_for_each(|object| server.put(object))?;
        let folder = fixture.folder.logs();
        let (kubeconfig, config) = (folder.join("kubeconfig"), folder.join("kube-proxy.json"));
        server.write_kubeconfig(&kubeconfig)?;
        fs::write(&config, configuration(&kubeconfig.display().to_string(), mode).to_string())?;
        let log = File::create(folder.join("kube-proxy.log"))?;
        let mut command = Command::new(program().context("no kube-proxy is named")?);
        command.arg("--config").arg(&config).args(["--v", "2"]);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let mut process = fixture.node.spawn(command)?;
        let started = Instant::now();
        loop {
            let mut list = Command::new(listing[0]);
            list.args(&listing[1..]);
            let rules = fixture.node.output(list)?;
            if String::from_utf8_lossy(&rules.stdout).contains("default/flooded") {
                return Ok(Self { _process: process, _server: server, _runtime: runtime });
            }
            let ended = process.try_wait()?.is_some();
            ensure!(
                !ended && started.elapsed() < PATIENCE,
                "kube-proxy {} within {PATIENCE:?}:\n{}",
                if ended { "ended" } else { "wrote no rules" },
                fs::read_to_string(folder.join("kube-proxy.log")).unwrap_or_default()
            );
            sleep(Duration::from_millis(200));
        }
    }
}

/// Returns a KubeProxyConfiguration that leaves the machine's own settings alone: the limits of
/// connection tracking do not belong to a namespace.
fn configuration(kubeconfig: &str, mode: &str) -> Value {
    serde_json::json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": mode,
        "hostnameOverride": NODE_NAME,
        "clusterCIDR": super::services::CLUSTER,
        "clientConnection": {
            "kubeconfig": kubeconfig,
            "contentType": "application/json",
            "acceptContentTypes": "application/json",
        },
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "iptables": {"localhostNodePorts": false},
        "nodePortAddresses": ["primary"],
    })
}
