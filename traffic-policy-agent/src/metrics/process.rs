//! The process metrics of every Prometheus client library, under the same names.

use std::{fs, time::SystemTime};

use nix::time::{ClockId, clock_gettime};

use super::{exposition::Family, labels::unix};

pub fn families(started: SystemTime) -> Vec<Family> {
    let mut families = vec![
        Family::gauge("process_start_time_seconds", "When the agent was started, in seconds since 1970.")
            .with(&[], unix(started)),
    ];
    if let Ok(time) = clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID) {
        let seconds = time.tv_sec() as f64 + time.tv_nsec() as f64 / 1e9;
        families.push(
            Family::counter("process_cpu_seconds_total", "CPU time that the agent used, user and system.")
                .with(&[], seconds),
        );
    }
    if let Some(bytes) = fs::read_to_string("/proc/self/status").ok().as_deref().and_then(resident) {
        families.push(
            Family::gauge("process_resident_memory_bytes", "Memory of the agent, without its maps.")
                .with(&[], bytes as f64),
        );
    }
    if let Ok(open) = fs::read_dir("/proc/self/fd") {
        families.push(
            Family::gauge("process_open_fds", "Open file descriptors, maps and programs among them.")
                .with(&[], open.count() as f64),
        );
    }
    families
}

/// Returns the resident memory of `/proc/self/status`, in bytes.
fn resident(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resident_memory_is_told_in_bytes() {
        assert_eq!(resident("Name:\tx\nVmRSS:\t   12 kB\nRssAnon:\t 3 kB\n"), Some(12_288));
        assert_eq!(resident("Name:\tx\n"), None);
        assert_eq!(families(SystemTime::now()).iter().filter(|f| !f.to_string().is_empty()).count(), 4);
    }
}
