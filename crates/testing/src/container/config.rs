//! The OCI runtime configuration of a pod's container, as a kubelet and containerd make it from a
//! pod's spec. A field that is not supported is an error, so that no test passes without what the
//! spec demands.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::{Container, PodSpec, SecurityContext, Volume};
use serde_json::{Value, json};

use super::{Root, Surroundings, hybrid, seccomp};
use crate::lab::{Family, Node};

/// Fields of a pod that are read here, or have no effect on a single container on one node.
const POD: [&str; 11] = [
    "automountServiceAccountToken",
    "containers",
    "hostNetwork",
    "hostPID",
    "nodeSelector",
    "priorityClassName",
    "serviceAccount",
    "serviceAccountName",
    "terminationGracePeriodSeconds",
    "tolerations",
    "volumes",
];
/// The same for a container. Probes are sent by the test.
const CONTAINER: [&str; 11] = [
    "args",
    "env",
    "envFrom",
    "image",
    "imagePullPolicy",
    "livenessProbe",
    "name",
    "readinessProbe",
    "resources",
    "securityContext",
    "volumeMounts",
];
/// The same for a security context. No machine of the tests has AppArmor.
const SECURITY: [&str; 6] = [
    "allowPrivilegeEscalation",
    "appArmorProfile",
    "capabilities",
    "readOnlyRootFilesystem",
    "runAsUser",
    "seccompProfile",
];

/// The folder with the token and the CA of a pod's service account.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

pub(super) fn of(pod: &PodSpec, root: &Root, node: &Node, around: &Surroundings) -> Result<Value> {
    only(&serde_json::to_value(pod)?, &POD, "a pod's spec")?;
    let [container] = &pod.containers[..] else { bail!("the pod has {} containers", pod.containers.len()) };
    only(&serde_json::to_value(container)?, &CONTAINER, "a container")?;
    ensure!(pod.host_network == Some(true), "a pod without hostNetwork is not understood here");
    let security = container.security_context.clone().unwrap_or_default();
    only(&serde_json::to_value(&security)?, &SECURITY, "a security context")?;

    let arguments = container.args.clone().unwrap_or_default();
    let words: Vec<&String> = root.entrypoint.iter().chain(&arguments).collect();
    for word in &words {
        ensure!(!word.contains("$("), "{word}: variables in arguments are not understood here");
    }
    let capabilities = capabilities(&security)?;
    let mut namespaces = vec![
        json!({"type": "mount"}),
        json!({"type": "ipc"}),
        json!({"type": "uts"}),
        json!({"type": "network", "path": node.netns().path()}),
    ];
    if pod.host_pid != Some(true) {
        namespaces.push(json!({"type": "pid"}));
    }
    let mut linux = json!({
        "namespaces": namespaces,
        // The paths that containerd masks.
        "maskedPaths": ["/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/scsi", "/sys/firmware"],
        "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
    });
    match security.seccomp_profile.as_ref().map(|profile| profile.type_.as_str()) {
        Some("RuntimeDefault") => {
            if let Some(profile) = seccomp::runtime_default(&capabilities)? {
                linux["seccomp"] = profile;
            }
        }
        None | Some("Unconfined") => {}
        Some(other) => bail!("seccompProfile {other} is not understood here"),
    }
    let user = security.run_as_user.unwrap_or(0);
    Ok(json!({
        "ociVersion": "1.0.2",
        "hostname": node.name,
        "root": { "path": root.folder, "readonly": security.read_only_root_filesystem == Some(true) },
        "process": {
            "terminal": false,
            "user": { "uid": user, "gid": 0 },
            "args": words,
            "env": environment(container, node, around)?,
            "cwd": "/",
            "noNewPrivileges": security.allow_privilege_escalation == Some(false),
            "capabilities": {
                "bounding": capabilities,
                // Only root gets them: other users would start with none.
                "effective": if user == 0 { &capabilities[..] } else { &[] },
                "permitted": if user == 0 { &capabilities[..] } else { &[] },
            },
        },
        "mounts": mounts(pod, container, root, around)?,
        "linux": linux,
    }))
}

fn only(object: &Value, known: &[&str], what: &str) -> Result<()> {
    for (key, value) in object.as_object().into_iter().flatten() {
        ensure!(value.is_null() || known.contains(&key.as_str()), "{key} of {what} is not understood here");
    }
    Ok(())
}

/// The capabilities of a container. All defaults must be dropped first, as they differ between
/// engines.
fn capabilities(security: &SecurityContext) -> Result<Vec<String>> {
    let capabilities = security.capabilities.clone().unwrap_or_default();
    let dropped = capabilities.drop.unwrap_or_default();
    ensure!(dropped == ["ALL"], "capabilities.drop is {dropped:?}, not [ALL]");
    Ok(capabilities.add.unwrap_or_default().iter().map(|name| format!("CAP_{name}")).collect())
}

fn environment(container: &Container, node: &Node, around: &Surroundings) -> Result<Vec<String>> {
    let mut variables: BTreeMap<String, String> = BTreeMap::new();
    for source in container.env_from.iter().flatten() {
        let map = source.config_map_ref.as_ref().context("envFrom is no ConfigMap")?;
        let map = around.config_maps.get(&map.name).with_context(|| format!("no ConfigMap {}", map.name))?;
        variables.extend(map.clone());
    }
    for variable in container.env.iter().flatten() {
        let value = match (&variable.value, &variable.value_from) {
            (Some(value), None) => value.clone(),
            (None, Some(source)) => {
                let field = source.field_ref.as_ref().map(|field| field.field_path.as_str());
                match field {
                    Some("spec.nodeName") => node.name.clone(),
                    Some("status.hostIP") => node.address(Family::V4).to_string(),
                    other => bail!("{}: {other:?} is not understood here", variable.name),
                }
            }
            _ => bail!("{} has no value", variable.name),
        };
        variables.insert(variable.name.clone(), value);
    }
    // The address of the API server's Service, as the kubelet sets it.
    variables.insert("KUBERNETES_SERVICE_HOST".to_owned(), "10.96.0.1".to_owned());
    variables.insert("KUBERNETES_SERVICE_PORT".to_owned(), "443".to_owned());
    let variables = variables.into_iter().map(|(name, value)| format!("{name}={value}"));
    Ok(["PATH=/usr/sbin:/usr/bin:/sbin:/bin".to_owned()].into_iter().chain(variables).collect())
}

fn mounts(pod: &PodSpec, container: &Container, root: &Root, around: &Surroundings) -> Result<Vec<Value>> {
    let mut mounts = vec![
        json!({"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]}),
        json!({"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "strictatime", "mode=755", "size=65536k"]}),
        json!({"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]}),
    ];
    let mut bind = |source: &Path, to: &str, read_only: bool| {
        let options = ["rbind", "rprivate", if read_only { "ro" } else { "rw" }];
        mounts.push(json!({"destination": to, "type": "bind", "source": source, "options": options}));
    };
    for (source, to) in &root.mounts {
        bind(source, to, true);
    }
    for mount in container.volume_mounts.iter().flatten() {
        only(&serde_json::to_value(mount)?, &["mountPath", "name", "readOnly"], "a volumeMount")?;
        let volume = pod.volumes.iter().flatten().find(|volume| volume.name == mount.name);
        let volume = volume.with_context(|| format!("no volume {}", mount.name))?;
        bind(&source(volume, root, around)?, &mount.mount_path, mount.read_only == Some(true));
    }
    let wants_token = pod.automount_service_account_token != Some(false);
    if let Some(folder) = around.service_account.as_ref().filter(|_| wants_token) {
        bind(folder, SERVICE_ACCOUNT, true);
    }
    Ok(mounts)
}

/// The folder or file that is mounted for a volume.
fn source(volume: &Volume, root: &Root, around: &Surroundings) -> Result<PathBuf> {
    only(&serde_json::to_value(volume)?, &["configMap", "hostPath", "name"], "a volume")?;
    if let Some(host) = &volume.host_path {
        let found =
            around.host.get(&host.path).with_context(|| format!("nothing stands for {}", host.path))?;
        ensure!(host.type_.as_deref() == Some("Directory"), "hostPath {} is no Directory", host.path);
        return Ok(hybrid::path(found));
    }
    let map = volume.config_map.as_ref().with_context(|| format!("volume {} is empty", volume.name))?;
    let files = around.config_maps.get(&map.name).with_context(|| format!("no ConfigMap {}", map.name))?;
    let folder = root.folder.with_file_name("volumes").join(&volume.name);
    fs::create_dir_all(&folder)?;
    for (name, content) in files {
        fs::write(folder.join(name), content)?;
    }
    Ok(folder)
}
