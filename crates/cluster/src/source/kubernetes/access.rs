//! Address and credentials of the API.

use std::{
    env,
    net::IpAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use kube::{
    Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use tokio::{
    net::TcpStream,
    time::{sleep, timeout},
};

/// The folder with the token and the CA of a pod's service account.
pub const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// The name in the API server's certificate, the same in every cluster.
const SERVER_NAME: &str = "kubernetes.default.svc";

/// The time limit for an answer from the API's cluster IP.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub enum Access {
    Kubeconfig(PathBuf),
    /// A kubeconfig, chosen as kubectl does.
    Chosen {
        /// The kubeconfig. Without it, the files of `KUBECONFIG`, or `~/.kube/config`.
        file: Option<PathBuf>,
        /// The context. Without it, the current one.
        context: Option<String>,
    },
    InCluster {
        /// The URL `https://HOST:PORT` of an API server. Without it, its cluster IP
        /// (`KUBERNETES_SERVICE_HOST`).
        api_server: Option<String>,
        /// The folder with `token` and `ca.crt`, ordinarily [`SERVICE_ACCOUNT`]. Both are read
        /// again when they change.
        service_account: PathBuf,
    },
}

#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    #[error("kubeconfig {}: {source}", path.display())]
    Kubeconfig { path: PathBuf, source: kube::config::KubeconfigError },
    #[error("no kubeconfig ({0}): name one by --kubeconfig, or a folder by --manifests")]
    NoKubeconfig(kube::config::KubeconfigError),
    #[error("API client: {0}")]
    Client(#[from] kube::Error),
    #[error("{text:?} is not the address of an API server, write https://HOST:PORT")]
    Address { text: String },
    #[error("{text:?} would carry the service account's token in clear: write https://HOST:PORT")]
    Clear { text: String },
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
    /// Returns the address of the API and credentials, except the token of a service account.
    ///
    /// # Errors
    /// Files cannot be read; or an API server does not answer and only its cluster IP is known.
    pub(super) async fn config(&self) -> Result<Config, AccessError> {
        match self {
            Self::Kubeconfig(path) => from_file(path, KubeConfigOptions::default()).await,
            Self::Chosen { file, context } => {
                let options = KubeConfigOptions { context: context.clone(), ..KubeConfigOptions::default() };
                match file {
                    Some(path) => from_file(path, options).await,
                    None => {
                        let wrap = AccessError::NoKubeconfig;
                        let kubeconfig = Kubeconfig::read().map_err(wrap)?;
                        let config =
                            Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(wrap)?;
                        tell_risks(&config, "kubeconfig");
                        Ok(config)
                    }
                }
            }
            Self::InCluster { api_server, service_account } => {
                readable(&service_account.join("token"))?;
                let url = match api_server {
                    Some(url) => url.clone(),
                    None => cluster_ip().await?,
                };
                let parsed: Result<hyper::Uri, _> = url.parse();
                let uri = parsed.ok().filter(|uri| uri.host().is_some() && uri.scheme().is_some());
                let uri = uri.ok_or_else(|| AccessError::Address { text: url.clone() })?;
                if uri.scheme_str() != Some("https") && !is_loopback(&uri) {
                    return Err(AccessError::Clear { text: url });
                }
                let mut config = Config::new(uri);
                if config.cluster_url.scheme_str() == Some("https") {
                    let authority = service_account.join("ca.crt");
                    readable(&authority)?;
                    config.root_cert_file = Some(authority);
                    // Only the file counts; without this, kube would first load the system's
                    // certificates, and an image has none.
                    config.root_cert = Some(Vec::new());
                    config.tls_server_name = api_server.as_ref().map(|_| SERVER_NAME.to_owned());
                }
                Ok(config)
            }
        }
    }

    /// Returns the path of a service account's token.
    pub(super) fn token(&self) -> Option<PathBuf> {
        match self {
            Self::Kubeconfig(_) | Self::Chosen { .. } => None,
            Self::InCluster { service_account, .. } => Some(service_account.join("token")),
        }
    }
}

async fn from_file(path: &Path, options: KubeConfigOptions) -> Result<Config, AccessError> {
    let wrap = |source| AccessError::Kubeconfig { path: path.to_owned(), source };
    let kubeconfig = Kubeconfig::read_from(path).map_err(wrap)?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(wrap)?;
    tell_risks(&config, &format!("kubeconfig {}", path.display()));
    Ok(config)
}

fn tell_risks(config: &Config, of: &str) {
    for risk in risks(config) {
        tracing::warn!("{of}: {risk}");
    }
}

/// Whether requests to this address stay on this host.
fn is_loopback(uri: &hyper::Uri) -> bool {
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Returns warnings about an insecure configuration.
fn risks(config: &Config) -> Vec<String> {
    let mut risks = Vec::new();
    if config.accept_invalid_certs {
        risks.push(
            "insecure-skip-tls-verify: whoever is on the way can pretend to be the API server".to_owned(),
        );
    }
    if config.cluster_url.scheme_str() != Some("https") && !is_loopback(&config.cluster_url) {
        risks.push(format!("{} is asked in clear, credentials included", config.cluster_url));
    }
    risks
}

fn readable(path: &Path) -> Result<(), AccessError> {
    match std::fs::File::open(path) {
        Ok(_) => Ok(()),
        Err(source) => Err(AccessError::ServiceAccount { path: path.to_owned(), source }),
    }
}

/// Returns the URL of the API's cluster IP, after it has answered.
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
            // A refusal arrives at once: limit this to two attempts a second.
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
        // An address with a port that was free a moment ago.
        let address = {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            listener.local_addr().unwrap().to_string()
        };
        let error = answers(&address, Duration::from_millis(100)).await.unwrap_err().to_string();
        assert!(error.contains("--api-server"), "{error}");
        assert!(error.contains("refused"), "{error}");
    }

    #[tokio::test]
    async fn a_token_is_not_sent_in_clear() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("token"), "secret").unwrap();
        let access = |url: &str| Access::InCluster {
            api_server: Some(url.to_owned()),
            service_account: folder.path().to_owned(),
        };
        for url in ["http://192.0.2.1:6443", "http://api.example:80", "http://[2001:db8::1]:6443"] {
            let error = access(url).config().await.err().unwrap().to_string();
            assert!(error.contains("in clear") && error.contains("https"), "{error}");
        }
        for url in ["http://127.0.0.1:8001", "http://[::1]:8001", "http://localhost:8001"] {
            assert!(access(url).config().await.is_ok(), "{url}");
        }
    }

    #[test]
    fn risks_of_a_kubeconfig_are_told() {
        let mut config = Config::new("https://192.0.2.1:6443".parse().unwrap());
        assert_eq!(risks(&config), [""; 0]);
        config.accept_invalid_certs = true;
        assert!(risks(&config)[0].contains("insecure-skip-tls-verify"));
        let config = Config::new("http://192.0.2.1:8080".parse().unwrap());
        assert!(risks(&config)[0].contains("in clear"));
    }

    #[tokio::test]
    async fn an_answering_cluster_ip_is_taken() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        answers(&listener.local_addr().unwrap().to_string(), PATIENCE).await.unwrap();
    }
}
