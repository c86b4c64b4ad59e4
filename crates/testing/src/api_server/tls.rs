//! Certificates of the test server.

use std::{fs, path::Path, process::Command, sync::Arc};

use anyhow::{Context, Result, ensure};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        RootCertStore, ServerConfig,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
        server::WebPkiClientVerifier,
    },
};

/// A self-signed certificate, which is its own authority.
#[derive(Clone, Debug)]
pub struct Certificate {
    /// The certificate as a client needs it in its `ca.crt`.
    pub pem: String,
    /// The private key.
    pub key_pem: String,
    config: Arc<ServerConfig>,
}

impl Certificate {
    /// Makes a certificate for one DNS name with the `openssl` command.
    pub fn for_name(name: &str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let path = |file: &str| folder.path().join(file);
        let made = Command::new("openssl")
            .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"])
            .args(["-subj", "/CN=test", "-addext", &format!("subjectAltName=DNS:{name}")])
            .args(["-addext", "basicConstraints=critical,CA:FALSE"])
            .arg("-keyout")
            .arg(path("key"))
            .arg("-out")
            .arg(path("certificate"))
            .output()
            .context("openssl")?;
        ensure!(made.status.success(), "openssl: {}", String::from_utf8_lossy(&made.stderr));
        Self::read(&path("certificate"), &path("key"))
    }

    fn read(certificate: &Path, key: &Path) -> Result<Self> {
        Self::new(fs::read_to_string(certificate)?, fs::read_to_string(key)?, None)
    }

    /// Returns the same certificate for a server that requires clients to show the certificate
    /// `client`.
    pub fn asking_for(self, client: &Self) -> Result<Self> {
        Self::new(self.pem, self.key_pem, Some(client))
    }

    fn new(pem: String, key_pem: String, client: Option<&Self>) -> Result<Self> {
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()?;
        let builder = match client {
            None => builder.with_no_client_auth(),
            Some(client) => {
                let mut roots = RootCertStore::empty();
                roots.add(CertificateDer::from_pem_slice(client.pem.as_bytes())?)?;
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build()?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let mut config = builder.with_single_cert(
            vec![CertificateDer::from_pem_slice(pem.as_bytes())?],
            PrivateKeyDer::from_pem_slice(key_pem.as_bytes())?,
        )?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Self { pem, key_pem, config: Arc::new(config) })
    }

    /// Returns the same certificate for a server without HTTP/2.
    #[must_use]
    pub fn without_http2(mut self) -> Self {
        Arc::make_mut(&mut self.config).alpn_protocols = vec![b"http/1.1".to_vec()];
        self
    }

    pub(super) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.config))
    }
}
