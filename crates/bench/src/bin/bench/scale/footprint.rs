//! Memory and CPU usage of the agent and its maps.

use std::{fs, thread::sleep, time::Duration};

use anyhow::{Context, Result};

use super::{ENDPOINTS, Rows, add, named, stage::Stage};
use crate::report::{Goal, Report, Row, Unit};

/// Duration that covers a few of each of the agent's periods.
const IDLE: Duration = Duration::from_secs(4);

const GROUP: &str = "scale, agent";
const ROWS: [&str; 4] = [
    "memory (resident)",
    "memory of its own (RssAnon)",
    "most memory so far (VmHWM)",
    "CPU while nothing changes",
];
const MAPS: &str = "scale, memory of maps";
const MAP_ROWS: [&str; 4] =
    ["all maps", "IPv4 flow, both entries", "IPv6 flow, both entries", "IPv4 Service with 10 endpoints"];

pub(super) fn rows(services: u32) -> Rows {
    let agent = ROWS.iter().map(|row| (GROUP, format!("{row}, {}", named(services))));
    agent.chain(MAP_ROWS.iter().map(|row| (MAPS, (*row).to_owned()))).collect()
}

/// Memory of a process, in megabytes.
pub(super) struct Memory {
    /// Resident memory, including the pages of maps that it wrote to.
    pub(super) resident: f64,
    /// Resident private memory: its allocations.
    own: f64,
    /// Peak of resident memory.
    pub(super) peak: f64,
}

impl Memory {
    pub(super) fn of(pid: u32) -> Result<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let field = |name: &str| -> Result<f64> {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let kilobytes = line.and_then(|line| line.split_whitespace().next());
            let kilobytes: f64 = kilobytes.with_context(|| format!("no {name} of process {pid}"))?.parse()?;
            Ok(kilobytes * 1024.0 / 1e6)
        };
        Ok(Self { resident: field("VmRSS:")?, own: field("RssAnon:")?, peak: field("VmHWM:")? })
    }
}

/// Returns the CPU time that the threads of a process have used so far.
pub(super) fn cpu_time(pid: u32) -> Result<Duration> {
    let mut all = Duration::ZERO;
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread may end at any time.
        let Ok(text) = fs::read_to_string(thread?.path().join("schedstat")) else { continue };
        let nanoseconds = text.split_whitespace().next().context("an empty schedstat")?;
        all += Duration::from_nanos(nanoseconds.parse()?);
    }
    Ok(all)
}

pub(super) fn measure(stage: &Stage, report: &mut Report) -> Result<()> {
    let (pid, name) = (stage.pid()?, named(stage.services));
    let before = cpu_time(pid)?;
    sleep(IDLE);
    let idle = (cpu_time(pid)? - before).as_secs_f64() / IDLE.as_secs_f64() * 100.0;
    let memory = Memory::of(pid)?;
    let figures = [
        (Unit::Megabytes, memory.resident),
        (Unit::Megabytes, memory.own),
        (Unit::Megabytes, memory.peak),
        (Unit::Percent, idle),
    ];
    for ((what, (unit, figure)), i) in ROWS.into_iter().zip(figures).zip(0..) {
        let row = Row::new(GROUP, &format!("{what}, {name}"), unit, &[figure]);
        add(report, if i == 0 { row.goal(Goal::AtMost(150.0)) } else { row });
    }
    maps(stage, report)
}

/// Measures the memory that the kernel charges for the maps.
fn maps(stage: &Stage, report: &mut Report) -> Result<()> {
    let status = stage.agent.json(&["status"])?;
    let maps = status["maps"].as_array().context("status names no maps")?;
    let find = |name: &str| -> Result<(f64, f64)> {
        let map = maps.iter().find(|map| map["name"] == name).with_context(|| format!("no map {name}"))?;
        let number = |field: &str| map[field].as_f64().with_context(|| format!("{name} has no {field}"));
        Ok((number("bytes")?, number("size")?))
    };
    let all: f64 = maps.iter().filter_map(|map| map["bytes"].as_f64()).sum();
    // A flow has two entries.
    let flow = |name| find(name).map(|(bytes, size)| 2.0 * bytes / size);
    // Arrays have a fixed capacity, whatever part of it is used; hashes grow.
    let each = |name| find(name).map(|(bytes, _)| bytes / f64::from(stage.services));
    let slot = |name| find(name).map(|(bytes, size)| bytes / size * f64::from(ENDPOINTS));
    let service =
        each("tp_frontends4")? + each("tp_svc_names")? + slot("tp_endpoints4")? + slot("tp_ep_routes4")?;
    let figures = [
        (Unit::Megabytes, all / 1e6),
        (Unit::Bytes, flow("tp_flows4")?),
        (Unit::Bytes, flow("tp_flows6")?),
        (Unit::Bytes, service),
    ];
    for (name, (unit, figure)) in MAP_ROWS.into_iter().zip(figures) {
        add(report, Row::new(MAPS, name, unit, &[figure]));
    }
    Ok(())
}
