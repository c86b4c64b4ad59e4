//! 10,000 Services of which 500 have the algorithm maglev, each with a table of its own: the goals
//! are those of 10,000 Services without one. Changes are measured with equal weights, then with
//! unequal ones.

use anyhow::{Result, ensure};

use super::{
    Rows, add, changes, changes::percentile, cluster, footprint::Memory, stage::Stage, start::Starts,
};
use crate::{
    Effort,
    report::{Goal, Report, Row, Unit},
};

const SERVICES: u32 = 10_000;
const TABLES: u32 = SERVICES / cluster::MAGLEV_EVERY;
/// Room for all tables of 16,381 slots, which take four slots an element, and for some more while
/// tables change.
const FLAGS: [&str; 2] = ["--maglev-entries", "2097152"];

/// Direct forwarding, with room for three former tables of each Service beside the present one and
/// the one that is written. The outer packet is chosen, because nodes that are asked whether it
/// gets there would have to answer.
const DIRECT: [&str; 10] = [
    "--maglev-entries",
    "8388608",
    "--endpoint-entries",
    "1048576",
    "--forwarding",
    "direct",
    "--announce-opening",
    "traffic-policy",
    "--dispatch",
    "ipip",
];

const GROUP: &str = "scale, 500 of 10k Services with maglev";
const ROWS: [&str; 8] = [
    "first sync, complete lists to maps",
    "memory (resident)",
    "change of an endpoint of one of them to maps, p50",
    "change of an endpoint of one of them to maps, p99",
    "the same with unequal weights, p50",
    "the same with unequal weights, p99",
    "the same with direct forwarding, which keeps former owners, p50",
    "the same with direct forwarding, which keeps former owners, p99",
];

fn rows() -> Rows {
    ROWS.map(|row| (GROUP, row.to_owned())).into()
}

pub(super) fn measure(effort: Effort, report: &mut Report) -> Result<()> {
    if !super::wants(report, &rows()) {
        return Ok(());
    }
    let mut stage = Stage::build_with(SERVICES, &FLAGS, true)?;
    let mut starts = Starts::default();
    starts.take_over(&mut stage)?;
    all_have_tables(&stage)?;
    let took = changes::times(&stage, effort, one_of_them)?;
    let memory = Memory::of(stage.pid()?)?.resident;
    for _ in 1..if effort.full { 5 } else { 2 } {
        starts.anew(&mut stage)?;
    }
    all_have_tables(&stage)?;
    weigh(&stage)?;
    let weighted = changes::times(&stage, effort, one_of_them)?;
    all_have_tables(&stage)?;
    drop(stage);
    let direct = of_direct(effort)?;
    let [synced, resident, p50, p99, weighted_p50, weighted_p99, direct_p50, direct_p99] = ROWS;
    let row = Row::new(GROUP, synced, Unit::Milliseconds, &starts.synced);
    add(report, row.goal(Goal::AtMost(2_000.0)));
    add(report, Row::new(GROUP, resident, Unit::Megabytes, &[memory]).goal(Goal::AtMost(150.0)));
    add(report, Row::new(GROUP, p50, Unit::Milliseconds, &took));
    let row = Row::new(GROUP, p99, Unit::Milliseconds, &[percentile(&took, 99)]);
    add(report, row.goal(Goal::AtMost(5.0)));
    add(report, Row::new(GROUP, weighted_p50, Unit::Milliseconds, &weighted));
    let row = Row::new(GROUP, weighted_p99, Unit::Milliseconds, &[percentile(&weighted, 99)]);
    add(report, row.goal(Goal::AtMost(5.0)));
    add(report, Row::new(GROUP, direct_p50, Unit::Milliseconds, &direct));
    let row = Row::new(GROUP, direct_p99, Unit::Milliseconds, &[percentile(&direct, 99)]);
    add(report, row.goal(Goal::AtMost(5.0)));
    Ok(())
}

/// Returns the times of changes of Services with unequal weights whose former owners are kept.
fn of_direct(effort: Effort) -> Result<Vec<f64>> {
    let mut stage = Stage::build_with(SERVICES, &DIRECT, true)?;
    cluster::leases().try_for_each(|lease| stage.control_plane.server().put(lease))?;
    Starts::default().take_over(&mut stage)?;
    weigh(&stage)?;
    let took = changes::times(&stage, effort, one_of_them)?;
    stage.maps()?.check_direct(one_of_them(0))?;
    let metrics = stage.agent.scrape()?;
    let used = metrics.value("traffic_policy_map_entries", &[("map", "maglev")])?;
    ensure!(used >= f64::from(2 * TABLES * 16_381 / 4), "{used} elements: no former owners");
    ensure!(!stage.agent.log().contains("no room for the former owners"), "some former owners had no room");
    Ok(took)
}

/// Returns the Service that is changed as the `i`th one.
fn one_of_them(i: u32) -> u32 {
    i * 7_919 % TABLES * cluster::MAGLEV_EVERY
}

/// Gives the endpoints of all of them unequal weights, one Service after the other: each needs room
/// for a second table while its own changes.
fn weigh(stage: &Stage) -> Result<()> {
    let maps = stage.maps()?;
    for service in (0..SERVICES).step_by(cluster::MAGLEV_EVERY as usize) {
        let before = maps.frontend(service);
        stage.control_plane.server().put(cluster::weighted(service))?;
        maps.wait(service, before)?;
    }
    Ok(())
}

/// Fails unless every one of the Services has its table.
fn all_have_tables(stage: &Stage) -> Result<()> {
    let metrics = stage.agent.scrape()?;
    let used = metrics.value("traffic_policy_map_entries", &[("map", "maglev")])?;
    ensure!(used >= f64::from(TABLES * 16_381 / 4), "{used} elements: some Service has no table");
    Ok(())
}
