//! Scripts of `deploy/`, and the cluster that they make.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use serde_json::Value;

use crate::{objects, root, text};

const SCRIPTS: [&str; 2] = ["deploy/kind/up.sh", "deploy/kind/down.sh"];

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

/// The overlay names the control plane by the cluster's name, the scripts name the cluster, and all of their files are there.
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
    let named = up.split_whitespace().filter(|word| word.starts_with("deploy/"));
    let mut count = 0;
    for path in named {
        assert!(root().join(path).exists(), "{path}");
        count += 1;
    }
    assert_eq!(count, 2);
}

/// The Containerfile copies the file that `cargo xtask image` leaves.
#[test]
fn the_containerfile_has_the_image_s_entry_point() {
    let file = text("deploy/Containerfile");
    assert!(file.contains("RUN cargo xtask image"));
    assert!(file.contains("ENTRYPOINT [\"/traffic-policy-agent\"]"));
    assert!(file.contains("FROM scratch"));
}
