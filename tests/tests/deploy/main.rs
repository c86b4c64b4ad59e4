//! Installation by `deploy/` and `cargo xtask image`: objects, scripts, the image, and the agent in
//! containers made of those objects. The last needs root and crun; the rest runs anywhere.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod acceptance;
mod completion;
mod container;
mod dry_run;
mod flows;
mod guide;
mod image;
mod kubectl;
mod manual;
mod nodes;
mod objects;
mod remains;
mod scripts;
mod settings;
mod walk;

use std::path::{Path, PathBuf};

use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Pod, core::v1::PodSpec};
use serde_json::Value;
use traffic_policy_testing::kustomize;

/// Folders with a `kustomization.yaml`.
const FOLDERS: [&str; 7] = [
    "deploy/base",
    "deploy/overlays/kind",
    "deploy/overlays/kind-xdp",
    "deploy/overlays/kubeadm",
    "deploy/overlays/registry",
    "deploy/overlays/static-pod",
    "deploy/overlays/cleanup",
];

/// The root folder of the project.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn text(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn objects(folder: &str) -> Vec<Value> {
    kustomize::build(&root().join(folder)).unwrap()
}

/// The pod that a folder defines.
fn pod(folder: &str) -> PodSpec {
    for object in objects(folder) {
        match object["kind"].as_str().unwrap() {
            "DaemonSet" => {
                let set: DaemonSet = serde_json::from_value(object).unwrap();
                return set.spec.unwrap().template.spec.unwrap();
            }
            "Pod" => {
                let pod: Pod = serde_json::from_value(object).unwrap();
                return pod.spec.unwrap();
            }
            _ => {}
        }
    }
    panic!("{folder} makes no pod");
}
