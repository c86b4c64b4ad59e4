//! Address and credentials of the API.

use std::{
    env,
    path::{Path, PathBuf},
    time::Duration,
};

use kube::{
    Client, Config,
    client::ClientBuilder,
    config::{KubeConfigOptions, Kubeconfig},
};
use tokio::{
    net::TcpStream,
    time::{sleep, timeout},
};

use super::observe::Observe;
use crate::source::status::StatusWriter;

/// Where a pod finds the token and the CA of its service account.
pub const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// The name that the API server's certificate carries in every cluster.
const SERVER_NAME: &str = "kubernetes.default.svc";

/// How long the API's cluster IP may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub enum Access {
    Kubeconfig(PathBuf),
    InCluster {
        /// `https://HOST:PORT` of an API server. Without it, its cluster IP (`KUBERNETES_SERVICE_HOST`).
        api_server: Option<String>,
        /// The folder with `token` and `ca.crt`, ordinarily [`SERVICE_ACCOUNT`]. Both are read again when they change.
        service_account: PathBuf,
    },
}

#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    #[error("kubeconfig {}: {source}", path.display())]
    Kubeconfig { path: PathBuf, source: kube::config::KubeconfigError },
    #[error("API client: {0}")]
    Client(#[from] kube::Error),
    #[error("{text:?} is not the address of an API server, write https://HOST:PORT")]
    Address { text: String },
    #[error("service account: {}: {source}", path.display())]
    ServiceAccount { path: PathBuf, source: std::io::Error },
    #[error(
        "not in a cluster (KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set): give --kubeconfig, \
         --manifests, or --api-server"
    )]
    NotInCluster,
    #[error(
        "the API server's cluster IP {address} does not answer ({reason}). A cluster IP works only once a Service \
         proxy has programmed this node, which may be this agent's own task: give the API server's real address with \
         --api-server https://HOST:PORT"
    )]
    ClusterIp { address: String, reason: String },
}

impl Access {
    pub(super) async fn client(&self, status: &StatusWriter) -> Result<Client, AccessError> {
        match self {
            Self::Kubeconfig(path) => {
                let wrap = |source| AccessError::Kubeconfig { path: path.clone(), source };
                let kubeconfig = Kubeconfig::read_from(path).map_err(wrap)?;
                let options = KubeConfigOptions::default();
                let config = Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(wrap)?;
                build(config, None, status)
            }
            Self::InCluster { api_server, service_account } => {
                let token = service_account.join("token");
                readable(&token)?;
                let url = match api_server {
                    Some(url) => url.clone(),
                    None => cluster_ip().await?,
                };
                let parsed: Result<hyper::Uri, _> = url.parse();
                let uri = parsed.ok().filter(|uri| uri.host().is_some() && uri.scheme().is_some());
                let mut config = Config::new(uri.ok_or(AccessError::Address { text: url })?);
                if config.cluster_url.scheme_str() == Some("https") {
                    let authority = service_account.join("ca.crt");
                    readable(&authority)?;
                    config.root_cert_file = Some(authority);
                    config.tls_server_name = api_server.as_ref().map(|_| SERVER_NAME.to_owned());
                }
                build(config, Some(token), status)
            }
        }
    }
}

fn build(config: Config, token: Option<PathBuf>, status: &StatusWriter) -> Result<Client, AccessError> {
    let observe = Observe::new(config.cluster_url.to_string(), token, status.clone());
    Ok(ClientBuilder::try_from(config)?.with_layer(&observe).build())
}

fn readable(path: &Path) -> Result<(), AccessError> {
    match std::fs::File::open(path) {
        Ok(_) => Ok(()),
        Err(source) => Err(AccessError::ServiceAccount { path: path.to_owned(), source }),
    }
}

/// The URL of the API's cluster IP, after it has answered.
async fn cluster_ip() -> Result<String, AccessError> {
    let variable = |name| env::var(name).map_err(|_| AccessError::NotInCluster);
    let (host, port) = (variable("KUBERNETES_SERVICE_HOST")?, variable("KUBERNETES_SERVICE_PORT")?);
    let address = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    answers(&address, PATIENCE).await?;
    Ok(format!("https://{address}"))
}

async fn answers(address: &str, patience: Duration) -> Result<(), AccessError> {
    let mut reason = format!("no answer within {} s", patience.as_secs());
    let connected = timeout(patience, async {
        while let Err(error) = TcpStream::connect(address).await {
            reason = error.to_string();
            sleep(Duration::from_millis(500)).await;
        }
    })
    .await;
    connected.map_err(|_| AccessError::ClusterIp { address: address.to_owned(), reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_silent_cluster_ip_names_the_flag() {
        // A port that was free a moment ago.
        let address = {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            listener.local_addr().unwrap().to_string()
        };
        let error = answers(&address, Duration::from_millis(100)).await.unwrap_err().to_string();
        assert!(error.contains("--api-server"), "{error}");
        assert!(error.contains("refused"), "{error}");
    }

    #[tokio::test]
    async fn an_answering_cluster_ip_is_taken() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        answers(&listener.local_addr().unwrap().to_string(), PATIENCE).await.unwrap();
    }
}
