//! An OCI image layout in one tar file:
//! <https://github.com/opencontainers/image-spec/blob/v1.1.0/image-layout.md>.
//!
//! `index.json` refers to one index by the image's name, and that index refers to one manifest for
//! each platform. So engines that select a manifest by name and those that select by platform find
//! the same.
//!
//! The archive is packed here and not by a tool. `buildah` (nine packages of Debian) needs root or
//! a user namespace and a storage of its own, and writes its own history into the configuration;
//! its archives carry the annotation for podman alone. Builders as those of the crate `oci-spec`
//! take the place of each object below, in no fewer lines, and pack nothing: `tar` and `flate2` do.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tar::Builder;

use super::layer::{Layer, PROGRAM, append, digest};

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// The image of one architecture.
#[derive(Debug)]
pub(super) struct Platform {
    /// The architecture by its OCI name, which is Go's.
    pub(super) architecture: &'static str,
    pub(super) layer: Layer,
}

#[derive(Debug)]
pub(super) struct Archive {
    pub(super) bytes: Vec<u8>,
    /// The digest of the index: the one by which a registry would identify the image.
    pub(super) digest: String,
}

/// Packs the archive. It contains nothing of this machine and no time: the same programs and name
/// give the same bytes.
pub(super) fn pack(name: &str, platforms: &[Platform]) -> Result<Archive> {
    let mut blobs = Blobs::default();
    let manifests: Vec<Value> = platforms.iter().map(|platform| manifest(&mut blobs, platform)).collect();
    let index = json!({
        "schemaVersion": 2,
        "mediaType": INDEX,
        "manifests": manifests,
        "annotations": labels(),
    });
    let mut named = blobs.add(INDEX, index.to_string().into_bytes());
    let digest = named["digest"].as_str().unwrap_or_default().to_owned();
    // podman reads the first annotation, containerd the second.
    named["annotations"] = json!({
        "org.opencontainers.image.ref.name": name,
        "io.containerd.image.name": name,
    });
    let top = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [named] });
    let bytes = blobs.write(&top).context("packing the archive failed")?;
    Ok(Archive { bytes, digest })
}

/// Adds the manifest of a platform, and returns its descriptor.
fn manifest(blobs: &mut Blobs, platform: &Platform) -> Value {
    let Platform { architecture, layer } = platform;
    let config = json!({
        "architecture": architecture,
        "os": "linux",
        "config": {
            "Entrypoint": [format!("/{PROGRAM}")],
            "Labels": labels(),
            "User": "0:0",
            "WorkingDir": "/",
        },
        "rootfs": { "type": "layers", "diff_ids": [layer.diff_id] },
    });
    let config = blobs.add(CONFIG, config.to_string().into_bytes());
    let layer = blobs.add(LAYER, layer.gzip.clone());
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": config,
        "layers": [layer],
        "annotations": labels(),
    });
    let mut descriptor = blobs.add(MANIFEST, manifest.to_string().into_bytes());
    descriptor["platform"] = json!({ "architecture": architecture, "os": "linux" });
    descriptor
}

/// Returns the labels, see
/// <https://github.com/opencontainers/image-spec/blob/v1.1.0/annotations.md>.
fn labels() -> Value {
    json!({
        "org.opencontainers.image.title": "traffic-policy",
        "org.opencontainers.image.description":
            "A Service proxy for one Kubernetes node, by XDP, TC and socket programs, with the exact meaning of externalTrafficPolicy and internalTrafficPolicy",
        "org.opencontainers.image.version": env!("CARGO_PKG_VERSION"),
        "org.opencontainers.image.source": env!("CARGO_PKG_REPOSITORY"),
        "org.opencontainers.image.licenses": env!("CARGO_PKG_LICENSE"),
    })
}

/// Blobs by their digests.
#[derive(Default)]
struct Blobs(BTreeMap<String, Vec<u8>>);

impl Blobs {
    /// Adds a blob, and returns its descriptor.
    fn add(&mut self, media_type: &str, bytes: Vec<u8>) -> Value {
        let digest = digest(&bytes);
        let descriptor = json!({ "mediaType": media_type, "digest": digest, "size": bytes.len() });
        self.0.insert(digest, bytes);
        descriptor
    }

    fn write(&self, top: &Value) -> std::io::Result<Vec<u8>> {
        let mut tar = Builder::new(Vec::new());
        append(&mut tar, "oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#, 0o644)?;
        append(&mut tar, "index.json", top.to_string().as_bytes(), 0o644)?;
        for (digest, bytes) in &self.0 {
            append(&mut tar, &format!("blobs/{}", digest.replace(':', "/")), bytes, 0o644)?;
        }
        tar.into_inner()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    const NAME: &str = "localhost/traffic-policy:1";

    fn packed() -> Archive {
        let platform =
            |architecture, program: &[u8]| Platform { architecture, layer: Layer::of(program).unwrap() };
        pack(NAME, &[platform("amd64", b"one"), platform("arm64", b"two")]).unwrap()
    }

    fn files(archive: &Archive) -> BTreeMap<String, Vec<u8>> {
        let mut tar = tar::Archive::new(&archive.bytes[..]);
        let files = tar.entries().unwrap().map(|entry| {
            let mut entry = entry.unwrap();
            assert_eq!(entry.header().mtime().unwrap(), 0);
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            (entry.path().unwrap().to_str().unwrap().to_owned(), bytes)
        });
        files.collect()
    }

    /// Returns the object that a descriptor refers to.
    fn follow(files: &BTreeMap<String, Vec<u8>>, descriptor: &Value) -> Vec<u8> {
        let named = descriptor["digest"].as_str().unwrap();
        let bytes = &files[&format!("blobs/{}", named.replace(':', "/"))];
        assert_eq!(digest(bytes), named);
        assert_eq!(descriptor["size"], bytes.len());
        bytes.clone()
    }

    #[test]
    fn packing_twice_gives_the_same_bytes() {
        assert_eq!(packed().bytes, packed().bytes);
    }

    #[test]
    fn each_platform_is_found_by_the_name() {
        let archive = packed();
        let files = files(&archive);
        let read = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
        assert_eq!(read(&files["oci-layout"])["imageLayoutVersion"], "1.0.0");
        let top = read(&files["index.json"]);
        let [named] = &top["manifests"].as_array().unwrap()[..] else { panic!("{top}") };
        for annotation in ["org.opencontainers.image.ref.name", "io.containerd.image.name"] {
            assert_eq!(named["annotations"][annotation], NAME);
        }
        assert_eq!(named["digest"], archive.digest);
        let index = read(&follow(&files, named));
        let manifests = index["manifests"].as_array().unwrap();
        let platforms: Vec<_> =
            manifests.iter().map(|manifest| &manifest["platform"]["architecture"]).collect();
        assert_eq!(platforms, ["amd64", "arm64"]);
        for (descriptor, program) in manifests.iter().zip([b"one", b"two"]) {
            let manifest = read(&follow(&files, descriptor));
            let config = read(&follow(&files, &manifest["config"]));
            assert_eq!(config["architecture"], descriptor["platform"]["architecture"]);
            assert_eq!(config["config"]["Entrypoint"], json!(["/traffic-policy-agent"]));
            let layer = follow(&files, &manifest["layers"][0]);
            let mut unpacked = Vec::new();
            flate2::read::GzDecoder::new(&layer[..]).read_to_end(&mut unpacked).unwrap();
            assert_eq!(config["rootfs"]["diff_ids"], json!([digest(&unpacked)]));
            let mut tar = tar::Archive::new(&unpacked[..]);
            let mut content = Vec::new();
            tar.entries().unwrap().next().unwrap().unwrap().read_to_end(&mut content).unwrap();
            assert_eq!(content, program);
        }
        // Two layers, two configurations and two manifests, and the index.
        assert_eq!(files.keys().filter(|name| name.starts_with("blobs/")).count(), 7);
    }
}
