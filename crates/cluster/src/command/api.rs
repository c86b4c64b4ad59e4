//! Command-line flags for access to the Kubernetes API, also from a machine that is not a node.

use std::path::PathBuf;

use clap::Args;

use crate::source::{Access, SERVICE_ACCOUNT};

/// Access to the Kubernetes API.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Kubernetes API")]
pub struct ApiArguments {
    /// A kubeconfig. Default: in a pod its service account; elsewhere, as for kubectl, the files of
    /// KUBECONFIG, or ~/.kube/config.
    #[arg(long, env = "TRAFFIC_POLICY_KUBECONFIG", value_name = "F", conflicts_with = "api_server")]
    kubeconfig: Option<PathBuf>,
    /// The context of the kubeconfig. Default: its current-context.
    #[arg(long, env = "TRAFFIC_POLICY_CONTEXT", value_name = "NAME", conflicts_with = "api_server")]
    context: Option<String>,
    /// The real address of an API server, https://HOST:PORT, for use in a pod.
    #[arg(long, env = "TRAFFIC_POLICY_API_SERVER", value_name = "URL")]
    api_server: Option<String>,
}

impl ApiArguments {
    /// Returns the access that the flags select; without flags, that of the environment: a pod's
    /// service account, or kubectl's configuration.
    #[must_use]
    pub fn access(&self) -> Access {
        let in_pod = std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
        match (&self.kubeconfig, &self.context, &self.api_server) {
            (None, None, api_server) if in_pod || api_server.is_some() => {
                Access::InCluster { api_server: api_server.clone(), service_account: SERVICE_ACCOUNT.into() }
            }
            (file, context, _) => Access::Chosen { file: file.clone(), context: context.clone() },
        }
    }

    /// Returns the same access as flags of kubectl.
    #[must_use]
    pub fn for_kubectl(&self) -> Vec<std::ffi::OsString> {
        let mut flags = Vec::new();
        if let Some(file) = &self.kubeconfig {
            flags.extend(["--kubeconfig".into(), file.clone().into_os_string()]);
        }
        if let Some(context) = &self.context {
            flags.extend(["--context".into(), context.into()]);
        }
        if let Some(server) = &self.api_server {
            flags.extend(["--server".into(), server.into()]);
        }
        flags
    }
}
