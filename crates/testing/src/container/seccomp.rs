//! The profile that RuntimeDefault stands for: that of Debian's podman, resolved for a set of
//! capabilities.

use std::fs;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

const PROFILE: &str = "/usr/share/containers/seccomp.json";

/// The profile in OCI's form; `None`, with a printed reason, where this machine has no such
/// profile.
pub(super) fn runtime_default(capabilities: &[String]) -> Result<Option<Value>> {
    if !Path::new(PROFILE).exists() {
        // Written to stderr directly: the test harness would capture it otherwise.
        let why = "which Debian's podman brings";
        writeln!(std::io::stderr(), "containers run without seccomp: there is no {PROFILE}, {why}").ok();
        return Ok(None);
    }
    let profile: Value = serde_json::from_str(&fs::read_to_string(PROFILE)?)?;
    of(&profile, capabilities).map(Some)
}

/// Selects the parts of a profile for all containers that apply to a container with these
/// capabilities.
fn of(profile: &Value, capabilities: &[String]) -> Result<Value> {
    let has = |list: &Value| {
        let names = list.as_array().into_iter().flatten().filter_map(Value::as_str);
        names.map(|name| capabilities.iter().any(|own| own == name)).collect::<Vec<_>>()
    };
    let is_here = |list: &Value| {
        let names: Vec<_> = list.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        names.is_empty() || names.contains(&crate::image::architecture())
    };
    let mut rules = Vec::new();
    for rule in profile["syscalls"].as_array().context("the profile has no syscalls")? {
        let meant = has(&rule["includes"]["caps"]).iter().all(|has| *has)
            && !has(&rule["excludes"]["caps"]).iter().any(|has| *has)
            && is_here(&rule["includes"]["arches"]);
        if !meant {
            continue;
        }
        let mut own = Map::new();
        for key in ["names", "action", "errnoRet", "args"] {
            if !rule[key].is_null() {
                own.insert(key.to_owned(), rule[key].clone());
            }
        }
        rules.push(Value::Object(own));
    }
    let machine = if cfg!(target_arch = "aarch64") { "SCMP_ARCH_AARCH64" } else { "SCMP_ARCH_X86_64" };
    Ok(json!({
        "defaultAction": profile["defaultAction"],
        "defaultErrnoRet": profile["defaultErrnoRet"],
        "architectures": [machine],
        "syscalls": rules,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_by_capability() {
        let profile = json!({
            "defaultAction": "SCMP_ACT_ERRNO",
            "defaultErrnoRet": 38,
            "syscalls": [
                {"names": ["read"], "action": "SCMP_ACT_ALLOW", "args": [], "comment": "", "includes": {}, "excludes": {}},
                {"names": ["bpf"], "action": "SCMP_ACT_ALLOW", "args": null, "includes": {"caps": ["CAP_SYS_ADMIN"]}, "excludes": {}},
                {"names": ["bpf"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1, "includes": {}, "excludes": {"caps": ["CAP_SYS_ADMIN"]}},
                {"names": ["s390_runtime_instr"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["s390x"]}, "excludes": {}},
            ],
        });
        let actions = |capabilities: &[&str]| -> Vec<(String, String)> {
            let capabilities: Vec<_> = capabilities.iter().map(|name| (*name).to_owned()).collect();
            let rules = of(&profile, &capabilities).unwrap()["syscalls"].take();
            let rules = rules.as_array().unwrap().iter();
            let text = |value: &Value| value.as_str().unwrap().to_owned();
            rules.map(|rule| (text(&rule["names"][0]), text(&rule["action"]))).collect()
        };
        let rule = |name: &str, action: &str| (name.to_owned(), action.to_owned());
        assert_eq!(
            actions(&["CAP_SYS_ADMIN"]),
            [rule("read", "SCMP_ACT_ALLOW"), rule("bpf", "SCMP_ACT_ALLOW")]
        );
        assert_eq!(actions(&[]), [rule("read", "SCMP_ACT_ALLOW"), rule("bpf", "SCMP_ACT_ERRNO")]);
    }
}
