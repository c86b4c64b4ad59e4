//! Scripts of `deploy/`, and the cluster that they make.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::{objects, root, text};

const SCRIPTS: [&str; 4] =
    ["deploy/kind/up.sh", "deploy/kind/down.sh", "deploy/vagrant/build.sh", "deploy/vagrant/stories.sh"];

#[test]
fn scripts_are_sound() {
    let shellcheck = Command::new("shellcheck").arg("--version").output().is_ok();
    if !shellcheck {
        writeln!(std::io::stderr(), "scripts are only parsed: there is no shellcheck").unwrap();
    }
    for script in SCRIPTS {
        let path = root().join(script);
        let mode = path.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o111, 0o111, "{script} cannot be executed");
        assert!(text(script).contains("set -euo pipefail"), "{script} goes on after a failure");
        let mut checks = vec![("bash", vec!["-n"])];
        if shellcheck {
            checks.push(("shellcheck", vec![]));
        }
        for (program, arguments) in checks {
            let output = Command::new(program).args(&arguments).arg(&path).output().unwrap();
            let said = [output.stdout, output.stderr].concat();
            assert!(output.status.success(), "{program} {script}:\n{}", String::from_utf8_lossy(&said));
        }
    }
}

/// The overlay names the control plane after the cluster, the scripts name the cluster, and all of
/// their files exist.
#[test]
fn the_kind_cluster_is_one() {
    let cluster: Value = serde_yaml_ng::from_str(&text("deploy/kind/cluster.yaml")).unwrap();
    assert_eq!(cluster["networking"]["kubeProxyMode"], "none");
    let name = cluster["name"].as_str().unwrap();
    let overlay = objects("deploy/overlays/kind");
    let map = overlay.iter().find(|object| object["kind"] == "ConfigMap").unwrap();
    let api_server = format!("https://{name}-control-plane:6443");
    assert_eq!(map["data"]["TRAFFIC_POLICY_API_SERVER"], *api_server);
    assert!(text(SCRIPTS[0]).contains(&format!("cluster={name}\n")));
    assert!(text(SCRIPTS[1]).contains(&format!("--name {name}\n")));
    let up = text(SCRIPTS[0]);
    let words = up.split_whitespace().map(|word| word.strip_prefix("overlay=").unwrap_or(word));
    let named = words.filter(|word| word.starts_with("deploy/"));
    let mut count = 0;
    for path in named {
        assert!(root().join(path).exists(), "{path}");
        count += 1;
    }
    assert_eq!(count, 4);
}

/// Vagrant parses the file, where it is installed; and the file reports what is missing.
#[test]
fn the_vagrantfile_is_one() {
    let vagrant = |programs: &Path| {
        let state = tempfile::tempdir().unwrap();
        let mut command = Command::new("vagrant");
        command.args(["validate", "--ignore-provider"]).env("VAGRANT_CWD", root().join("deploy/vagrant"));
        command.env("VAGRANT_HOME", state.path()).env("VAGRANT_DOTFILE_PATH", state.path().join("dot"));
        command.env("TRAFFIC_POLICY_PROGRAMS", programs).output()
    };
    let programs = tempfile::tempdir().unwrap();
    let Ok(output) = vagrant(programs.path()) else {
        writeln!(std::io::stderr(), "SKIPPED the_vagrantfile_is_one: there is no vagrant").unwrap();
        return;
    };
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("run deploy/vagrant/build.sh first"), "{said}");
    for program in ["traffic-policy-agent", "lab", "bench"] {
        File::create(programs.path().join(program)).unwrap();
    }
    let output = vagrant(programs.path()).unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// The nodes of Vagrant, of `cargo xtask vm lab` and of the stories have the same pods, and one
/// script sets up both kinds of nodes.
#[test]
fn vagrant_and_the_vm_lab_make_the_same_nodes() {
    let lab = text("xtask/src/vm/lab.rs");
    assert!(lab.contains("PODS: [u8; 3] = [1, 2, 0]"));
    assert!(lab.contains("deploy/vagrant/node.sh") && lab.contains("deploy/vagrant/manifests.sh"));
    let vagrant = text("deploy/vagrant/Vagrantfile");
    assert!(vagrant.contains("PODS = \"1 2 0\"") && vagrant.contains("%w[node.sh manifests.sh]"));
    assert!(text("deploy/vagrant/stories.sh").contains("PODS=\"1 2 0\" bash manifests.sh"));
    // Both pass the script the same settings.
    let script = text("deploy/vagrant/node.sh");
    for variable in [
        "NUMBER",
        "NODES",
        "PODS",
        "DEVICE",
        "ROUTER4",
        "ROUTER6",
        "ATTACH",
        "LAB_PROGRAM",
        "MANIFESTS_SCRIPT",
    ] {
        assert!(script.contains(&format!("${variable}")), "{variable}");
        for (name, other) in [("vm lab", &lab), ("Vagrantfile", &vagrant)] {
            assert!(
                other.contains(&format!("{variable}=")) || other.contains(&format!("\"{variable}\" =>")),
                "{name}: {variable}"
            );
        }
    }
}

/// The Containerfile copies the file that `cargo xtask image` leaves.
#[test]
fn the_containerfile_has_the_image_s_entry_point() {
    let file = text("deploy/Containerfile");
    assert!(file.contains("RUN cargo xtask image"));
    assert!(file.contains("ENTRYPOINT [\"/traffic-policy-agent\"]"));
    assert!(file.contains("FROM scratch"));
}
