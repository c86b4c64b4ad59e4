//! A real kube-apiserver with etcd, as the envtest tools unpack them: `KUBEBUILDER_ASSETS` names
//! the folder.

use std::{
    env, fs,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use kube::{Client, Config, config::AuthInfo};

use crate::netns::Namespace;
use crate::pace::scaled;

const ADMIN_TOKEN: &str = "admin-token";
const PROXY_TOKEN: &str = "proxy-token";

/// A running control plane without controllers: Services get addresses, EndpointSlices are made by
/// hand.
#[derive(Debug)]
pub struct RealApiServer {
    folder: tempfile::TempDir,
    /// The network namespace to listen in, if it is not that of this process.
    namespace: Option<Namespace>,
    address: SocketAddr,
    processes: Vec<Child>,
}

impl RealApiServer {
    /// Starts etcd and kube-apiserver; returns `None` if `KUBEBUILDER_ASSETS` is not set.
    ///
    /// # Errors
    ///
    /// They do not come up within a minute of a fast machine; their logs are in the message.
    pub async fn start() -> Result<Option<Self>> {
        Self::start_at(None, Ipv4Addr::LOCALHOST.into()).await
    }

    /// A variant of [`Self::start`] that listens on an address of a namespace, where the nodes of a
    /// lab reach it. Clients must be inside the namespace, too.
    pub async fn start_in(namespace: &Namespace, address: IpAddr) -> Result<Option<Self>> {
        Self::start_at(Some(namespace.clone()), address).await
    }

    async fn start_at(namespace: Option<Namespace>, address: IpAddr) -> Result<Option<Self>> {
        let Some(assets) = env::var_os("KUBEBUILDER_ASSETS").map(PathBuf::from) else { return Ok(None) };
        let folder = tempfile::tempdir()?;
        let ports = || free_ports();
        let [etcd, etcd_peer, port] =
            namespace.as_ref().map_or_else(ports, |namespace| namespace.run(ports))?;
        let address = SocketAddr::new(address, port);
        let mut server = Self { folder, namespace, address, processes: Vec::new() };
        server.run(
            Command::new(assets.join("etcd"))
                .arg("--data-dir")
                .arg(server.path("etcd"))
                .arg(format!("--listen-client-urls=http://127.0.0.1:{etcd}"))
                .arg(format!("--advertise-client-urls=http://127.0.0.1:{etcd}"))
                .arg(format!("--listen-peer-urls=http://127.0.0.1:{etcd_peer}"))
                .arg("--unsafe-no-fsync"),
        )?;

        let key = server.path("service-account.key");
        let made = Command::new("openssl").args(["genrsa", "-out"]).arg(&key).arg("2048").output()?;
        ensure!(made.status.success(), "openssl genrsa: {}", String::from_utf8_lossy(&made.stderr));
        // The user to which the built-in binding gives the role system:node-proxier.
        let tokens = format!("{ADMIN_TOKEN},admin,1,system:masters\n{PROXY_TOKEN},system:kube-proxy,2\n");
        fs::write(server.path("tokens.csv"), tokens)?;
        server.run(
            Command::new(assets.join("kube-apiserver"))
                .arg(format!("--etcd-servers=http://127.0.0.1:{etcd}"))
                .arg(format!("--secure-port={port}"))
                .arg(format!("--bind-address={}", address.ip()))
                // The server's own certificate is made for this address.
                .arg(format!("--advertise-address={}", address.ip()))
                .arg(format!("--cert-dir={}", server.path("certificates").display()))
                .arg(format!("--token-auth-file={}", server.path("tokens.csv").display()))
                .arg("--authorization-mode=RBAC")
                .arg("--service-cluster-ip-range=10.96.0.0/16,fd00:10:96::/112")
                .arg("--service-account-issuer=https://kubernetes.default.svc")
                .arg(format!("--service-account-key-file={}", key.display()))
                .arg(format!("--service-account-signing-key-file={}", key.display()))
                .arg("--disable-admission-plugins=ServiceAccount"),
        )?;
        server.wait_until_ready().await?;
        Ok(Some(server))
    }

    /// The address as `https://HOST:PORT`, for `--api-server`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    /// Returns a client with all rights.
    pub fn admin(&self) -> Result<Client> {
        let mut config = Config::new(self.url().parse()?);
        config.root_cert_file = Some(self.certificate());
        config.auth_info = AuthInfo { token: Some(ADMIN_TOKEN.to_owned().into()), ..AuthInfo::default() };
        Ok(Client::try_from(config)?)
    }

    /// Fills a folder as the pod of a proxy finds it: token and CA of a service account with the
    /// role `system:node-proxier`.
    pub fn write_service_account(&self, folder: &Path) -> Result<()> {
        fs::write(folder.join("token"), PROXY_TOKEN)?;
        fs::copy(self.certificate(), folder.join("ca.crt"))?;
        Ok(())
    }

    /// Writes a file for `--kubeconfig`, for a user with the role `system:node-proxier`.
    pub fn write_kubeconfig(&self, path: &Path) -> Result<()> {
        let (url, certificate) = (self.url(), self.certificate());
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
             clusters: [{{name: c, cluster: {{server: '{url}', certificate-authority: '{}'}}}}]\n\
             users: [{{name: u, user: {{token: {PROXY_TOKEN}}}}}]\n\
             contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n",
            certificate.display()
        );
        fs::write(path, text).with_context(|| format!("writing {}", path.display()))
    }

    fn certificate(&self) -> PathBuf {
        self.path("certificates/apiserver.crt")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn run(&mut self, command: &mut Command) -> Result<()> {
        let name = Path::new(command.get_program()).file_name().unwrap_or_default().to_owned();
        let log = self.path(&format!("{}.log", name.display()));
        let log = fs::File::create(log)?;
        if let Some(namespace) = &self.namespace {
            namespace.enter_on_exec(command);
        }
        let child = command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn();
        self.processes.push(child.with_context(|| format!("{} does not start", name.display()))?);
        Ok(())
    }

    async fn wait_until_ready(&mut self) -> Result<()> {
        let give_up = Instant::now() + scaled(Duration::from_secs(60));
        loop {
            if self.is_ready().await {
                return Ok(());
            }
            let died = self.processes.iter_mut().any(|process| !matches!(process.try_wait(), Ok(None)));
            if died || Instant::now() > give_up {
                let mut logs = String::new();
                for name in ["etcd.log", "kube-apiserver.log"] {
                    logs.push_str(&fs::read_to_string(self.path(name)).unwrap_or_default());
                }
                bail!("the API server does not come up:\n{logs}");
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Whether the server is ready, with the built-in roles in place.
    async fn is_ready(&self) -> bool {
        let Ok(client) = self.admin() else { return false };
        let Ok(request) = hyper::Request::get("/readyz").body(Vec::new()) else { return false };
        client.request_text(request).await.is_ok_and(|text| text == "ok")
    }
}

impl Drop for RealApiServer {
    fn drop(&mut self) {
        for process in self.processes.iter_mut().rev() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

fn free_ports<const N: usize>() -> Result<[u16; N]> {
    let mut listeners = Vec::new();
    for _ in 0..N {
        listeners.push(TcpListener::bind("127.0.0.1:0")?);
    }
    let mut ports = [0; N];
    for (port, listener) in ports.iter_mut().zip(&listeners) {
        *port = listener.local_addr()?.port();
    }
    Ok(ports)
}
