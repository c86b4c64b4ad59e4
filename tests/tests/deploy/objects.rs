//! Objects of `deploy/`: all of their fields are the API's, and they are consistent with each
//! other.

use std::collections::BTreeSet;

use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{ConfigMap, Namespace, Pod, ServiceAccount},
    rbac::v1::{ClusterRoleBinding, Role, RoleBinding},
};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{FOLDERS, objects, pod, text};

/// Parses an object, and fails with the fields that the type does not have.
fn strictly<T: DeserializeOwned>(object: &Value) -> Result<T, String> {
    let mut unknown = Vec::new();
    let decoded = serde_ignored::deserialize(object.clone(), |path| unknown.push(path.to_string()));
    let decoded = decoded.map_err(|error| error.to_string())?;
    if unknown.is_empty() { Ok(decoded) } else { Err(format!("no such field: {}", unknown.join(", "))) }
}

fn decode(object: &Value) -> Result<(), String> {
    match object["kind"].as_str().unwrap() {
        "ServiceAccount" => strictly::<ServiceAccount>(object).map(drop),
        "ClusterRoleBinding" => strictly::<ClusterRoleBinding>(object).map(drop),
        "Namespace" => strictly::<Namespace>(object).map(drop),
        "Role" => strictly::<Role>(object).map(drop),
        "RoleBinding" => strictly::<RoleBinding>(object).map(drop),
        "ConfigMap" => strictly::<ConfigMap>(object).map(drop),
        "DaemonSet" => strictly::<DaemonSet>(object).map(drop),
        "Pod" => strictly::<Pod>(object).map(drop),
        kind => Err(format!("{kind} is not expected in deploy/")),
    }
}

#[test]
fn every_field_is_one_of_the_api() {
    let mut kinds = BTreeSet::new();
    for folder in FOLDERS {
        for object in objects(folder) {
            decode(&object).unwrap_or_else(|error| panic!("{folder}: {}: {error}", object["kind"]));
            kinds.insert(object["kind"].as_str().unwrap().to_owned());
        }
    }
    assert_eq!(kinds.len(), 5, "{kinds:?}");
}

#[test]
fn a_field_with_a_typing_error_is_found() {
    let mut set = objects("deploy/base").into_iter().find(|object| object["kind"] == "DaemonSet").unwrap();
    set["spec"]["template"]["spec"]["hostNetwrok"] = true.into();
    assert!(decode(&set).unwrap_err().contains("hostNetwrok"));
    let container = &mut set["spec"]["template"]["spec"]["containers"][0];
    container["livenessProbe"]["httpGet"]["port"] = Value::Bool(true);
    assert!(decode(&set).is_err());
}

#[test]
fn objects_fit_each_other() {
    for folder in FOLDERS.iter().filter(|folder| !folder.ends_with("static-pod")) {
        let objects = objects(folder);
        let of = |kind: &str| objects.iter().find(|object| object["kind"] == kind).unwrap();
        let (set, binding) = (of("DaemonSet"), of("ClusterRoleBinding"));
        let account = &of("ServiceAccount")["metadata"];
        let labels = &set["spec"]["template"]["metadata"]["labels"];
        for (key, value) in set["spec"]["selector"]["matchLabels"].as_object().unwrap() {
            assert_eq!(&labels[key], value, "{folder}: the selector does not match the pods");
        }
        assert_eq!(set["spec"]["template"]["spec"]["serviceAccountName"], account["name"], "{folder}");
        assert_eq!(set["metadata"]["namespace"], account["namespace"], "{folder}");
        let subject = &binding["subjects"][0];
        assert_eq!((&subject["name"], &subject["namespace"]), (&account["name"], &account["namespace"]));
        assert_eq!(binding["roleRef"]["name"], "system:node-proxier", "{folder}");
        let map = &of("ConfigMap")["metadata"];
        let source = &pod(folder).containers[0].env_from.clone().unwrap()[0];
        assert_eq!(source.config_map_ref.as_ref().unwrap().name, map["name"].as_str().unwrap());
        assert_eq!(map["namespace"], set["metadata"]["namespace"], "{folder}");
    }
}

/// Builds the overlay for kubeadm with one more component.
fn kubeadm_with(component: &str) -> Vec<Value> {
    let folder = tempfile::tempdir().unwrap();
    let root = crate::root();
    let file = format!(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n\
         resources: [{0}/deploy/overlays/kubeadm]\ncomponents: [{0}/deploy/components/{component}]\n",
        root.display()
    );
    std::fs::write(folder.path().join("kustomization.yaml"), file).unwrap();
    let objects = traffic_policy_testing::kustomize::build(folder.path()).unwrap();
    for object in &objects {
        decode(object).unwrap_or_else(|error| panic!("{}: {error}", object["kind"]));
    }
    objects
}

/// Fails unless what the setting names exists, and its role allows what the agent does there and
/// nothing elsewhere.
fn expect_role_for_leases(objects: &[Value], setting: &str) {
    let of = |kind: &str| objects.iter().find(|object| object["kind"] == kind).unwrap();
    let settings = &of("ConfigMap")["data"];
    assert!(settings["TRAFFIC_POLICY_KUBECONFIG"].is_string(), "the overlay's own stay");
    let namespace = &settings[setting];
    assert_eq!(&of("Namespace")["metadata"]["name"], namespace);
    let (role, binding, account) = (of("Role"), of("RoleBinding"), &of("ServiceAccount")["metadata"]);
    assert_eq!((&role["metadata"]["namespace"], &binding["metadata"]["namespace"]), (namespace, namespace));
    assert_eq!(binding["roleRef"]["name"], role["metadata"]["name"]);
    let subject = &binding["subjects"][0];
    assert_eq!((&subject["name"], &subject["namespace"]), (&account["name"], &account["namespace"]));
    let verbs = serde_json::json!(["list", "watch", "create", "patch", "delete"]);
    assert_eq!(
        (&role["rules"][0]["resources"], &role["rules"][0]["verbs"]),
        (&serde_json::json!(["leases"]), &verbs)
    );
}

/// The component with which agents tell each other that their nodes are about to go.
#[test]
fn notice_comes_with_what_it_takes() {
    let objects = kubeadm_with("notice");
    expect_role_for_leases(&objects, "TRAFFIC_POLICY_ANNOUNCE_LEAVING");
    let set = objects.iter().find(|object| object["kind"] == "DaemonSet").unwrap();
    let pod = &set["spec"]["template"]["spec"];
    let mounts = pod["containers"][0]["volumeMounts"].as_array().unwrap();
    assert!(mounts.iter().any(|mount| mount["mountPath"] == "/run/dbus"), "{mounts:?}");
    for mount in mounts {
        let volumes = pod["volumes"].as_array().unwrap();
        assert!(volumes.iter().any(|volume| volume["name"] == mount["name"]), "no volume {}", mount["name"]);
    }
}

/// The component with which agents tell each other that their nodes open packets.
#[test]
fn direct_forwarding_comes_with_what_it_takes() {
    let objects = kubeadm_with("direct");
    expect_role_for_leases(&objects, "TRAFFIC_POLICY_ANNOUNCE_OPENING");
    // Nodes ask each other by raw packets, beyond what each agent needs.
    let added = |objects: &[Value]| -> BTreeSet<String> {
        let set = objects.iter().find(|object| object["kind"] == "DaemonSet").unwrap();
        let container = &set["spec"]["template"]["spec"]["containers"][0];
        serde_json::from_value(container["securityContext"]["capabilities"]["add"].clone()).unwrap()
    };
    let mut expected = added(&kubeadm_with("notice"));
    expected.insert("NET_RAW".to_owned());
    assert_eq!(added(&objects), expected);
}

/// Combinations of valid fields that the API server would refuse, or a kubelet would not start.
#[test]
fn pods_can_be_admitted() {
    for folder in FOLDERS {
        let pod = pod(folder);
        let container = &pod.containers[0];
        let volumes: Vec<_> = pod.volumes.iter().flatten().map(|volume| volume.name.as_str()).collect();
        for mount in container.volume_mounts.iter().flatten() {
            assert!(volumes.contains(&mount.name.as_str()), "{folder}: no volume {}", mount.name);
        }
        let used = container.volume_mounts.iter().flatten().map(|mount| mount.name.as_str());
        assert_eq!(used.collect::<BTreeSet<_>>().len(), volumes.len(), "{folder}: a volume is not mounted");
        let security = container.security_context.as_ref().unwrap();
        let added = security.capabilities.as_ref().unwrap().add.clone().unwrap();
        // ValidateSecurityContext in k8s.io/kubernetes/pkg/apis/core/validation.
        let escalation = security.allow_privilege_escalation;
        assert!(!(added.contains(&"SYS_ADMIN".to_owned()) && escalation == Some(false)), "{folder}");
        assert_eq!((pod.host_network, pod.host_pid), (Some(true), Some(true)), "{folder}");
        assert_eq!(pod.priority_class_name.as_deref(), Some("system-node-critical"), "{folder}");
        // A static pod must not refer to an object of the API.
        if folder.ends_with("static-pod") {
            assert_eq!((&pod.service_account_name, &container.env_from), (&None, &None));
            assert!(pod.volumes.iter().flatten().all(|volume| volume.host_path.is_some()));
        }
    }
}

/// The static pod is a manual copy of the DaemonSet's: only the necessary differences exist.
#[test]
fn the_static_pod_is_that_of_the_daemon_set() {
    let value = |folder: &str| serde_json::to_value(pod(folder)).unwrap();
    let (mut set, mut own) = (value("deploy/base"), value("deploy/overlays/static-pod"));
    for key in ["serviceAccountName", "nodeSelector"] {
        assert!(set.as_object_mut().unwrap().remove(key).is_some(), "{key}");
    }
    assert!(set["containers"][0].as_object_mut().unwrap().remove("envFrom").is_some());
    let environment = own["containers"][0]["env"].as_array_mut().unwrap();
    let kubeconfig = "TRAFFIC_POLICY_KUBECONFIG";
    let given: Vec<_> =
        environment.iter().filter_map(|one| one["name"].as_str().map(str::to_owned)).collect();
    assert!(given.iter().any(|name| name == kubeconfig), "{given:?}");
    let map = objects("deploy/base").into_iter().find(|object| object["kind"] == "ConfigMap").unwrap();
    for (name, wanted) in map["data"].as_object().unwrap() {
        let found = environment.iter().find(|one| one["name"] == *name).unwrap();
        assert_eq!(&found["value"], wanted, "{name}");
    }
    environment.retain(|one| one.get("valueFrom").is_some());
    for list in ["/containers/0/volumeMounts", "/volumes"] {
        let list = own.pointer_mut(list).unwrap().as_array_mut().unwrap();
        list.retain(|one| one["name"] != "kubeconfig");
    }
    assert_eq!(own, set);
}

#[test]
fn the_image_is_the_one_that_is_built() {
    let name = concat!("localhost/traffic-policy:", env!("CARGO_PKG_VERSION"));
    // The example with another image has the same tag.
    let example = "registry.example.com/traffic-policy";
    for folder in FOLDERS {
        let image = pod(folder).containers.remove(0).image.unwrap();
        assert_eq!(image.replace(example, "localhost/traffic-policy"), name, "{folder}");
        assert_eq!(image.starts_with(example), folder.ends_with("registry"), "{folder}");
    }
    for page in ["deploy/Containerfile", "docs/install.md"] {
        assert!(text(page).contains(name), "{page} does not say {name}");
    }
}
