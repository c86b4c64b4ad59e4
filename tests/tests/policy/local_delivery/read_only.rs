//! An agent that cannot write the sysctls of conntrack, as in a container whose /proc/sys is
//! read-only: the stack delivers everything, and `status` and `check` say why.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use traffic_policy_testing::agent::{self, Agent};
use traffic_policy_testing::lab::{Cni, Family};
use traffic_policy_testing::pace::until;

use super::{DIRECT, MOST, PATIENCE, Scene, ask};

const LIBERAL: &str = "nf_conntrack_tcp_be_liberal";

#[test]
fn nothing_passes_by_where_conntrack_stays_strict() {
    let Some(mut scene) = Scene::start(Cni::Kindnet, "tc", &[]) else { return };
    assert_eq!(scene.sysctl(LIBERAL), "0");
    let script = scene.cluster.lab.logs().join("read-only");
    let text = format!(
        "#!/bin/sh\nset -e\nif [ -z \"$TP_INSIDE\" ]; then TP_INSIDE=1 exec unshare --mount --propagation private \"$0\" \"$@\"; fi\n\
         mount --bind /proc/sys /proc/sys\nmount -o remount,bind,ro /proc/sys\nexec {} \"$@\"\n",
        agent::program().unwrap().display()
    );
    fs::write(&script, text).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    scene.agent.stop().unwrap();
    let builder = Agent::builder(&scene.cluster.lab, scene.node()).attach("tc").flags(DIRECT);
    scene.agent = builder.program(&script).start().unwrap();
    scene.agent.wait_ready(PATIENCE).unwrap();

    let device = scene.pod_device();
    let state = || scene.agent.json(&["status"]).unwrap()["local_delivery"].clone();
    let reason = format!("{LIBERAL} cannot be set");
    let said = state()["by_stack"][&device].as_str().unwrap_or_default().to_owned();
    assert!(said.starts_with(&reason), "{said}");
    let output = scene.agent.command(&["check", "--local-delivery", "direct", "--output", "json"]).unwrap();
    let findings = String::from_utf8(output.stdout).unwrap();
    assert!(findings.contains(&format!("--local-delivery direct has no effect: {reason}")), "{findings}");
    let mut stream = scene.connect(scene.at(Family::V4));
    ask(&mut stream);
    assert_eq!(scene.ask_often(&mut stream), [0, 0]);

    // Another one sets them: within seconds packets pass by, on the connection that exists, too.
    let established = scene.sysctl("nf_conntrack_tcp_timeout_established");
    for (name, value) in [(LIBERAL, "1"), ("nf_conntrack_tcp_timeout_unacknowledged", &established)] {
        let path = format!("/proc/sys/net/netfilter/{name}");
        scene.node().netns().run(|| fs::write(path, value)).unwrap();
    }
    until("the program on the device", PATIENCE, || state()["direct"] == serde_json::json!([device]));
    until("direct packets", PATIENCE, || scene.ask_often(&mut stream)[0] >= MOST);
}
