//! A certificate as the server of a test shows it.

use std::{fs, path::Path, process::Command, sync::Arc};

use anyhow::{Context, Result, ensure};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        ServerConfig,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    },
};

/// A self-signed certificate: it is its own authority.
#[derive(Clone, Debug)]
pub struct Certificate {
    /// As a client needs it in its `ca.crt`.
    pub pem: String,
    config: Arc<ServerConfig>,
}

impl Certificate {
    /// Makes a certificate for one DNS name, by the `openssl` command.
    ///
    /// # Errors
    ///
    /// If there is no such command, or it fails.
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
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(
                vec![CertificateDer::from_pem_file(certificate)?],
                PrivateKeyDer::from_pem_file(key)?,
            )?;
        Ok(Self { pem: fs::read_to_string(certificate)?, config: Arc::new(config) })
    }

    pub(super) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.config))
    }
}
