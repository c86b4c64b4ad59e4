//! Machine of a report: kernel, processor, mitigations, settings of the BPF compiler.

use std::{collections::BTreeMap, fs, path::Path};

/// Prefixes of keys that must be equal for absolute figures of two runs to be compared.
pub(super) const DECISIVE: [&str; 6] = ["kernel", "cpu", "mitigation", "bpf jit", "governor", "hypervisor"];

/// Returns the properties of the machine by name. A property that cannot be read is reported as
/// unknown.
pub(super) fn environment() -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut note = |key: &str, value: Option<String>| {
        found.insert(key.to_owned(), value.unwrap_or_else(|| "unknown".to_owned()));
    };
    note("kernel", read("/proc/sys/kernel/osrelease"));
    note("kernel version", read("/proc/sys/kernel/version"));
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    note("cpu", of_cpu(&cpuinfo, "model name").map(str::to_owned));
    let cpus = std::thread::available_parallelism().ok().map(|number| number.to_string());
    note("cpus", cpus);
    note("hypervisor", Some(hypervisor(&cpuinfo)));
    let folder = Path::new("/sys/devices/system/cpu/vulnerabilities");
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        note(&format!("mitigation {name}"), read(entry.path()));
    }
    for (key, name) in [("enabled", "enable"), ("hardening", "harden")] {
        note(&format!("bpf jit {key}"), read(format!("/proc/sys/net/core/bpf_jit_{name}")));
    }
    note("bpf statistics", read("/proc/sys/kernel/bpf_stats_enabled"));
    let governor = read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor");
    note("governor", Some(governor.unwrap_or_else(|| "none (no frequency scaling)".to_owned())));
    note("clock", read("/sys/devices/system/clocksource/clocksource0/current_clocksource"));
    note("load average before", read("/proc/loadavg"));
    found
}

fn hypervisor(cpuinfo: &str) -> String {
    let virtual_machine =
        of_cpu(cpuinfo, "flags").is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor"));
    if !virtual_machine {
        return "none".to_owned();
    }
    let named =
        ["sys_vendor", "product_name"].iter().filter_map(|name| read(format!("/sys/class/dmi/id/{name}")));
    let named: Vec<_> = read("/sys/hypervisor/type").into_iter().chain(named).collect();
    if named.is_empty() { "of unknown make".to_owned() } else { named.join(" ") }
}

fn of_cpu<'a>(cpuinfo: &'a str, wanted: &str) -> Option<&'a str> {
    let mut fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
    fields.find_map(|(name, value)| (name.trim() == wanted).then(|| value.trim()))
}

fn read(path: impl AsRef<Path>) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}
