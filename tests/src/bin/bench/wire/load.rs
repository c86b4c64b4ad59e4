//! What fraction of a CPU each takes at equal load.
//!
//! The generator never sleeps: when no packet is due it drops the frame at once, and counts that. What such an idle turn
//! takes is measured alone, so the time of all of them is known; the rest of the time, less that of the subject that only
//! sends back, is the subject's. (Ticks of /proc/stat are too coarse for some percent.)

use anyhow::Result;

use super::{
    generator::{Send, Traffic},
    plan::{LOAD, NFTABLES},
    subject::{Kind, Subject},
};
use crate::{
    Effort,
    report::{Report, Row, Unit},
};

/// Packets a second.
const RATE: f64 = 200_000.0;
/// So long is each run, about.
const SECONDS: f64 = 0.1;

pub(crate) fn measure(
    subjects: &[&Subject],
    traffic: &mut Traffic,
    effort: Effort,
    report: &mut Report,
) -> Result<()> {
    for subject in subjects {
        subject.open(traffic)?;
    }
    let mut busy = vec![Vec::new(); subjects.len()];
    for _ in 0..effort.rounds {
        for (subject, busy) in subjects.iter().zip(&mut busy) {
            let idle = idle_turn(subject, traffic)?;
            traffic.aim(subject.kind.path(), Send::Requests, super::FLOWS, 0)?;
            traffic.pace(RATE)?;
            let run = traffic.flood(&subject.stand, (SECONDS / idle) as u32)?;
            busy.push(1.0 - run.idle as f64 * idle / run.took.as_secs_f64());
        }
    }
    let find = |wanted: Kind| subjects.iter().zip(&busy).find(|(subject, _)| subject.kind == wanted);
    let Some((_, bounce)) = find(Kind::Bounce) else { return Ok(()) };
    let own = |busy: &[f64]| -> Vec<f64> {
        busy.iter().zip(bounce).map(|(busy, bounce)| (busy - bounce) * 100.0).collect()
    };
    let nftables = find(NFTABLES).map(|(_, busy)| own(busy));
    for (subject, busy) in subjects.iter().zip(&busy) {
        if subject.kind == Kind::Bounce {
            continue;
        }
        let row = Row::new(LOAD, &subject.kind.to_string(), Unit::Percent, &own(busy));
        match &nftables {
            Some(nftables) if subject.kind != NFTABLES => report.add(row.beside("nftables, 1k", nftables)),
            _ => report.add(row),
        }
    }
    Ok(())
}

/// Seconds that a turn takes in which no packet is due.
pub(crate) fn idle_turn(subject: &Subject, traffic: &mut Traffic) -> Result<f64> {
    traffic.aim(subject.kind.path(), Send::Requests, super::FLOWS, 0)?;
    // One burst, and the next one long after the end.
    traffic.pace(1.0)?;
    let run = traffic.flood(&subject.stand, 500_000)?;
    Ok(run.took.as_secs_f64() / run.idle as f64)
}
