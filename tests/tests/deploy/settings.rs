//! Arguments, variables and capabilities of the pods, compared with the agent's command line and
//! with the document about them.

use std::collections::{BTreeMap, BTreeSet};

use clap::{Command, CommandFactory};
use traffic_policy_agent::command::Arguments;

use crate::{FOLDERS, objects, pod, text};

/// The variables with a value that the container of a folder gets, from any source.
fn variables(folder: &str) -> BTreeMap<String, String> {
    let maps = objects(folder).into_iter().filter(|object| object["kind"] == "ConfigMap");
    let mut variables = BTreeMap::new();
    for map in maps {
        let data = map["data"].as_object().unwrap().clone();
        variables.extend(data.into_iter().map(|(name, value)| (name, value.as_str().unwrap().to_owned())));
    }
    for variable in pod(folder).containers[0].env.iter().flatten() {
        // The value comes from the downward API.
        let value = variable.value.clone().unwrap_or_else(|| "node-1".to_owned());
        variables.insert(variable.name.clone(), value);
    }
    variables
}

/// A sub-command whose arguments are found by their variables.
fn command(name: &str) -> Command {
    let mut program = Arguments::command();
    program.build();
    program.find_subcommand(name).unwrap_or_else(|| panic!("there is no command {name}")).clone()
}

#[test]
fn arguments_and_variables_are_the_agents() {
    for folder in FOLDERS {
        let pod = pod(folder);
        let arguments = pod.containers[0].args.clone().unwrap();
        let run = command("run");
        // Variables of the agent are passed as flags here, so that clap checks values and
        // conflicts.
        let mut words = vec!["traffic-policy-agent".to_owned(), "run".to_owned()];
        for (name, value) in variables(folder) {
            let flag = run.get_arguments().find(|flag| flag.get_env().is_some_and(|own| *own == *name));
            let flag = flag.unwrap_or_else(|| panic!("{folder}: no flag has the variable {name}"));
            words.extend([format!("--{}", flag.get_long().unwrap()), value]);
        }
        if arguments[0] == "run" {
            words.extend(arguments[1..].iter().cloned());
        } else {
            let own = ["traffic-policy-agent".to_owned()].into_iter().chain(arguments);
            let fits = Arguments::command().try_get_matches_from(own);
            fits.unwrap_or_else(|error| panic!("{folder}: {error}"));
        }
        Arguments::command().try_get_matches_from(&words).unwrap_or_else(|error| panic!("{folder}: {error}"));
    }
}

/// No overlay relies on the ClusterIP, which answers only once the agent itself serves it.
#[test]
fn each_overlay_says_how_the_api_server_is_reached() {
    for folder in ["kind", "kind-xdp", "kubeadm", "registry", "static-pod"] {
        let variables = variables(&format!("deploy/overlays/{folder}"));
        let says = |name: &str| variables.contains_key(&format!("TRAFFIC_POLICY_{name}"));
        assert!(says("API_SERVER") != says("KUBECONFIG"), "{folder}: {variables:?}");
    }
    // Users fill it in, in an overlay.
    let base = variables("deploy/base");
    assert!(
        !base.contains_key("TRAFFIC_POLICY_API_SERVER") && !base.contains_key("TRAFFIC_POLICY_KUBECONFIG")
    );
}

/// XDP in the driver of a veth is off unless it is requested.
#[test]
fn native_xdp_is_off_by_default() {
    for folder in FOLDERS.iter().filter(|folder| !folder.ends_with("cleanup")) {
        let wanted = if folder.ends_with("kind-xdp") { "xdp" } else { "auto" };
        assert_eq!(variables(folder)["TRAFFIC_POLICY_ATTACH"], wanted, "{folder}");
    }
}

/// The rows `| CAP_BPF | what for | when |` in docs/security.md.
fn documented() -> BTreeMap<String, String> {
    let page = text("docs/security.md");
    let rows = page.lines().filter_map(|line| {
        let cells: Vec<_> = line.split('|').map(str::trim).collect();
        let name = cells.get(1)?.strip_prefix("CAP_")?;
        Some((name.to_owned(), (*cells.get(3)?).to_owned()))
    });
    rows.collect()
}

#[test]
fn capabilities_are_those_that_the_document_lists() {
    let documented = documented();
    assert_eq!(documented.len(), 7, "{documented:?}");
    for folder in FOLDERS {
        let pod = pod(folder);
        let capabilities = pod.containers[0].security_context.clone().unwrap().capabilities.unwrap();
        assert_eq!(capabilities.drop.unwrap(), ["ALL"], "{folder}");
        let sockets = variables(folder).get("TRAFFIC_POLICY_CGROUP").is_none_or(|cgroup| cgroup != "none");
        // Nothing in deploy/ listens on a port below 1024.
        let low_ports =
            variables(folder).keys().any(|name| name.ends_with("_ADDRESS") || name.ends_with("_PORTS"));
        let needed = documented.iter().filter(|(name, when)| match when.as_str() {
            "always" => true,
            "where there may be some" => low_ports,
            _ if when.starts_with("with `--cgroup`") => sockets,
            _ if when.starts_with("with `--announce-opening`") => {
                variables(folder).contains_key("TRAFFIC_POLICY_ANNOUNCE_OPENING")
            }
            _ => panic!("CAP_{name} is kept {when:?}, which this test does not know"),
        });
        let needed: BTreeSet<_> = needed.map(|(name, _)| name.clone()).collect();
        assert_eq!(BTreeSet::from_iter(capabilities.add.unwrap()), needed, "{folder}");
    }
}

/// A rollout waits for the first sync of each pod: without the probe a release that never syncs
/// would reach every node.
#[test]
fn a_rollout_waits_for_the_first_sync() {
    for folder in FOLDERS.iter().filter(|folder| !folder.ends_with("cleanup")) {
        let pod = pod(folder);
        let probe = pod.containers[0].readiness_probe.clone().unwrap_or_else(|| panic!("{folder}: no probe"));
        let path = probe.http_get.and_then(|asked| asked.path);
        assert_eq!(path.as_deref(), Some("/readyz"), "{folder}");
    }
}

/// The clean-up of an overlay uses its image and settings: a node has no other.
#[test]
fn an_overlay_cleans_up_with_its_own_image() {
    const OWN: &str = "registry.example.com/traffic-policy:0.1.0";
    let overlay = "deploy/overlays/registry";
    assert_eq!(pod(overlay).containers[0].image.as_deref(), Some(OWN));
    let folder = tempfile::tempdir().unwrap();
    let root = crate::root();
    let file = format!(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [{0}/{overlay}]\ncomponents: [{0}/deploy/components/cleanup]\n",
        root.display()
    );
    std::fs::write(folder.path().join("kustomization.yaml"), file).unwrap();
    let objects = traffic_policy_testing::kustomize::build(folder.path()).unwrap();
    let set = objects.iter().find(|object| object["kind"] == "DaemonSet").unwrap();
    let container = &set["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(
        (&container["image"], &container["args"]),
        (&OWN.into(), &serde_json::json!(["cleanup", "--wait"]))
    );
    assert!(container["livenessProbe"].is_null() && container["readinessProbe"].is_null());
    assert!(container["securityContext"].is_object());
}
