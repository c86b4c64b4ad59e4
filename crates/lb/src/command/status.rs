//! `kubectl traffic-policy status NODE`: `status` of the agent on a node, run by `kubectl exec` in
//! its pod, so that the right to exec there is required and sufficient.

use std::{
    ffi::{OsStr, OsString},
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use clap::Args;
use traffic_policy_cluster::command::{
    api::ApiArguments,
    view::{self, Output, OutputArguments},
};

/// The namespace of the agent as deploy/ installs it; the next constant is the label of its pods.
const NAMESPACE: &str = "kube-system";
const SELECTOR: &str = "app.kubernetes.io/name=traffic-policy";
const CONTAINER: &str = "agent";
/// The path of the agent in the image.
const AGENT: &str = "/traffic-policy-agent";

/// Show what the agent of a node has attached, whether its maps are in sync with the cluster, and
/// its counters. Runs `kubectl exec` in its pod.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// The node's name.
    #[arg(value_name = "NODE")]
    node: String,
    /// The namespace of the agent's pods.
    #[arg(long, short, env = "TRAFFIC_POLICY_NAMESPACE", default_value = NAMESPACE, value_name = "NAME")]
    namespace: String,
    /// The label of the agent's pods.
    #[arg(long, env = "TRAFFIC_POLICY_SELECTOR", default_value = SELECTOR, value_name = "LABELS")]
    selector: String,
    /// The kubectl to use.
    #[arg(long, env = "TRAFFIC_POLICY_KUBECTL", default_value = "kubectl", value_name = "FILE")]
    kubectl: PathBuf,
    #[command(flatten)]
    output: OutputArguments,
    #[command(flatten)]
    api: ApiArguments,
}

impl Arguments {
    pub(super) fn execute(self) -> Result<()> {
        if !is_name(&self.node) {
            return Err(view::usage(&format!("`{}` is not the name of a node", self.node)).into());
        }
        let pod = self.pod()?;
        let format = match self.output.output {
            Output::Table => "table",
            Output::Json => "json",
        };
        let words = ["exec", &pod, "--container", CONTAINER, "--", AGENT, "status", "--output", format];
        let status = self.kubectl(words).status().with_context(|| self.cannot_start())?;
        if !status.success() {
            // kubectl or the agent has printed the reason.
            bail!("{pod} on node {} gives no status ({status})", self.node);
        }
        Ok(())
    }

    /// Returns the pod as `pod/NAME`.
    fn pod(&self) -> Result<String> {
        let fields = format!("spec.nodeName={},status.phase=Running", self.node);
        let words =
            ["get", "pods", "--selector", &self.selector, "--field-selector", &fields, "--output", "name"];
        let output =
            self.kubectl(words).stderr(Stdio::inherit()).output().with_context(|| self.cannot_start())?;
        if !output.status.success() {
            bail!("the pods of namespace {} cannot be listed ({})", self.namespace, output.status);
        }
        let text = String::from_utf8_lossy(&output.stdout);
        match text.lines().map(str::trim).find(|line| !line.is_empty()) {
            Some(pod) => Ok(pod.to_owned()),
            None => bail!(
                "no pod with the label {} runs on node {} in namespace {}: see `kubectl get nodes` for its name, --namespace and \
                 --selector for where the agent is; where it runs without a pod, call `traffic-policy-agent status` on the node",
                self.selector,
                self.node,
                self.namespace
            ),
        }
    }

    fn kubectl<W: AsRef<OsStr>>(&self, words: impl IntoIterator<Item = W>) -> Command {
        let mut command = Command::new(&self.kubectl);
        command.args(self.api.for_kubectl()).args([OsString::from("--namespace"), (&self.namespace).into()]);
        command.args(words);
        command
    }

    fn cannot_start(&self) -> String {
        format!("{} cannot be started: name it by --kubectl", self.kubectl.display())
    }
}

/// Whether a text is a valid name. It becomes part of a field selector, where a comma would begin
/// another field.
fn is_name(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.'))
}
