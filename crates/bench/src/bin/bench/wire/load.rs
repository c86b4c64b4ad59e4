//! CPU load of each data path at equal packet rate.
//!
//! The generator sends a burst when one is due and is idle otherwise. A burst is timed from its
//! beginning until all resulting work is done, which is before the generator continues. The time of
//! the subject that only sends packets back is subtracted. (Ticks of /proc/stat are too coarse for
//! a few percent.)

use anyhow::{Result, ensure};

use super::{
    generator::{Send, Traffic},
    plan::{LOAD, NFTABLES},
    subject::{Kind, Subject},
};
use crate::{
    Effort,
    report::{Row, Unit},
};

/// Packets per second.
const RATE: f64 = 200_000.0;
/// Packets of one burst, as from a device that is polled some ten thousand times a second.
const BURST: u32 = 16;
/// Approximate duration of each run.
const SECONDS: f64 = 0.1;

pub(crate) fn measure(subjects: &[&Subject], traffic: &mut Traffic, effort: Effort) -> Result<Vec<Row>> {
    for subject in subjects {
        subject.open(traffic)?;
    }
    let mut turns = Vec::new();
    for subject in subjects {
        turns.push((SECONDS / idle_turn(subject, traffic)?) as u32);
    }
    let mut busy = vec![Vec::new(); subjects.len()];
    for _ in 0..effort.rounds {
        for ((subject, busy), turns) in subjects.iter().zip(&mut busy).zip(&turns) {
            traffic.aim(subject.kind.path(), Send::Requests, super::FLOWS, 0)?;
            traffic.pace(RATE, BURST)?;
            let run = traffic.flood(&subject.fixture.client, *turns)?;
            let arrived = run.counts.of(subject.wanted()) as f64;
            let rate = arrived / run.took.as_secs_f64();
            // A machine that stalled for a moment has sent fewer packets; bursts are the same.
            ensure!(
                (0.5..1.1).contains(&(rate / RATE)),
                "{}: {rate:.0} packets a second arrive",
                subject.kind
            );
            busy.push(run.busy.as_secs_f64() / arrived * RATE);
        }
    }
    let find = |wanted: Kind| subjects.iter().zip(&busy).find(|(subject, _)| subject.kind == wanted);
    let Some((_, bounce)) = find(Kind::Bounce) else { return Ok(Vec::new()) };
    let own = |busy: &[f64]| -> Vec<f64> {
        busy.iter().zip(bounce).map(|(busy, bounce)| (busy - bounce) * 100.0).collect()
    };
    let nftables = find(NFTABLES).map(|(_, busy)| own(busy));
    let mut rows = Vec::new();
    for (subject, busy) in subjects.iter().zip(&busy) {
        if subject.kind == Kind::Bounce {
            continue;
        }
        let row = Row::new(LOAD, &subject.kind.to_string(), Unit::Percent, &own(busy));
        match &nftables {
            Some(nftables) if subject.kind != NFTABLES => rows.push(row.beside("nftables, 1k", nftables)),
            _ => rows.push(row),
        }
    }
    Ok(rows)
}

/// Measures the seconds of a turn in which no packet is due.
fn idle_turn(subject: &Subject, traffic: &mut Traffic) -> Result<f64> {
    traffic.aim(subject.kind.path(), Send::Requests, super::FLOWS, 0)?;
    const TURNS: f64 = 500_000.0;
    // One burst is sent, and the next one is due long after the end.
    traffic.pace(1.0, 1)?;
    let run = traffic.flood(&subject.fixture.client, TURNS as u32)?;
    Ok(run.took.as_secs_f64() / TURNS)
}
