//! What the agent and its maps use.

use std::{fs, thread::sleep, time::Duration};

use anyhow::{Context, Result};

use super::{ENDPOINTS, named, stage::Stage};
use crate::report::{Goal, Report, Row, Unit};

/// Long enough for a few of each of the agent's rounds.
const IDLE: Duration = Duration::from_secs(4);

/// Of a process, in megabytes.
pub(super) struct Memory {
    /// Resident, with the pages of maps that it wrote to.
    resident: f64,
    /// Resident and nobody else's: what it allocated.
    own: f64,
    /// The most that was ever resident.
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

/// CPU time that the threads of a process have used so far.
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
    let mut add = |what: &str, unit, value: f64, goal| {
        let row = Row::new("agent", &format!("{what}, {name}"), unit, &[value]);
        report.add(match goal {
            Some(goal) => row.goal(goal),
            None => row,
        });
    };
    add("memory (resident)", Unit::Megabytes, memory.resident, Some(Goal::AtMost(150.0)));
    add("memory of its own (RssAnon)", Unit::Megabytes, memory.own, None);
    add("most memory so far (VmHWM)", Unit::Megabytes, memory.peak, None);
    add("CPU while nothing changes", Unit::Percent, idle, None);
    maps(stage, report)
}

/// What the kernel charges for the maps.
fn maps(stage: &Stage, report: &mut Report) -> Result<()> {
    let status = stage.agent.json(&["status"])?;
    let maps = status["maps"].as_array().context("status names no maps")?;
    let find = |name: &str| -> Result<(f64, f64)> {
        let map = maps.iter().find(|map| map["name"] == name).with_context(|| format!("no map {name}"))?;
        let number = |field: &str| map[field].as_f64().with_context(|| format!("{name} has no {field}"));
        Ok((number("bytes")?, number("room")?))
    };
    let all: f64 = maps.iter().filter_map(|map| map["bytes"].as_f64()).sum();
    // Two halves each.
    let flow = |name| find(name).map(|(bytes, room)| 2.0 * bytes / room);
    // Arrays have room for so many, whoever uses it; hashes grow.
    let each = |name| find(name).map(|(bytes, _)| bytes / f64::from(stage.services));
    let slot = |name| find(name).map(|(bytes, room)| bytes / room * f64::from(ENDPOINTS));
    let service = each("FRONTENDS4")? + each("SERVICES")? + slot("SLOTS4")? + slot("SLOT_ROUTES4")?;
    let rows = [
        ("all", Unit::Megabytes, all / 1e6),
        ("an IPv4 flow, both halves", Unit::Bytes, flow("FLOWS4")?),
        ("an IPv6 flow, both halves", Unit::Bytes, flow("FLOWS6")?),
        ("an IPv4 Service with its endpoints", Unit::Bytes, service),
    ];
    for (name, unit, value) in rows {
        report.add(Row::new("memory of the maps", name, unit, &[value]));
    }
    Ok(())
}
