//! Archives of images as `cargo xtask image` makes them, read without the code that wrote them.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Cursor, Read as _};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use flate2::read::GzDecoder;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

/// An archive whose digests have been verified.
#[derive(Debug)]
pub struct Image {
    files: BTreeMap<String, Vec<u8>>,
    /// The name under which container engines load it.
    pub name: String,
    /// The descriptors of its platforms.
    platforms: Vec<Value>,
}

impl Image {
    /// Reads and verifies an archive.
    ///
    /// # Errors
    /// It cannot be read, is no OCI archive, or some content does not match its digest.
    pub fn read(path: &Path) -> Result<Self> {
        let file = fs::File::open(path).with_context(|| path.display().to_string())?;
        let mut files = BTreeMap::new();
        for entry in tar::Archive::new(file).entries()? {
            let mut entry = entry?;
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes)?;
            files.insert(entry.path()?.display().to_string(), bytes);
        }
        let mut image = Self { files, name: String::new(), platforms: Vec::new() };
        let layout = serde_json::from_slice::<Value>(image.file("oci-layout")?)?;
        ensure!(layout["imageLayoutVersion"] == "1.0.0", "oci-layout: {layout}");
        let top = serde_json::from_slice::<Value>(image.file("index.json")?)?;
        let named = &top["manifests"][0];
        let name = named["annotations"]["org.opencontainers.image.ref.name"].as_str();
        image.name = name.context("the image has no name")?.to_owned();
        let index = image.json(named)?;
        image.platforms = index["manifests"].as_array().context("the index has no manifests")?.clone();
        Ok(image)
    }

    /// The architectures of the image, as OCI names them.
    pub fn architectures(&self) -> Vec<&str> {
        self.platforms.iter().filter_map(|platform| platform["platform"]["architecture"].as_str()).collect()
    }

    /// The configuration of the image for an architecture.
    pub fn config(&self, architecture: &str) -> Result<Value> {
        let config = self.json(&self.manifest(architecture)?["config"])?;
        ensure!(config["architecture"] == architecture, "the configuration is of {}", config["architecture"]);
        Ok(config)
    }

    /// Unpacks the layers for an architecture into a folder.
    pub fn unpack(&self, architecture: &str, folder: &Path) -> Result<()> {
        let manifest = self.manifest(architecture)?;
        for layer in manifest["layers"].as_array().context("the manifest has no layers")? {
            let unpacked = GzDecoder::new(Cursor::new(self.blob(layer)?));
            tar::Archive::new(unpacked).unpack(folder).context("unpacking a layer")?;
        }
        Ok(())
    }

    fn manifest(&self, architecture: &str) -> Result<Value> {
        let found =
            self.platforms.iter().find(|platform| platform["platform"]["architecture"] == architecture);
        self.json(found.with_context(|| format!("the image is not for {architecture}"))?)
    }

    fn json(&self, descriptor: &Value) -> Result<Value> {
        Ok(serde_json::from_slice(self.blob(descriptor)?)?)
    }

    fn blob(&self, descriptor: &Value) -> Result<&[u8]> {
        let digest = descriptor["digest"].as_str().context("a descriptor has no digest")?;
        let bytes = self.file(&format!("blobs/{}", digest.replace(':', "/")))?;
        let hash: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        ensure!(digest == format!("sha256:{hash}"), "{digest} is sha256:{hash}");
        Ok(bytes)
    }

    fn file(&self, name: &str) -> Result<&[u8]> {
        self.files.get(name).map(Vec::as_slice).with_context(|| format!("the archive has no {name}"))
    }
}

/// The architecture of this machine, as OCI names it.
pub fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}
