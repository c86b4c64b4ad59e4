//! Reduction of a sequence to a shorter one in which program and model still differ.

use traffic_policy_testing::harness::Harness;

use crate::{
    action::{Action, Pieces},
    path::Path,
    run::{Difference, check},
    segment::{Number, Segment, Tag},
    totals::Totals,
};

/// Number of times that a sequence is repeated before it counts as one without a difference.
const TRIES: usize = 3;

/// Leaves out every action that is not needed for a difference: first those after it, then ever
/// smaller pieces, then payloads, wrong numbers and wrong tags. The difference may turn into
/// another one meanwhile.
pub fn shrink(
    harness: &mut Harness,
    path: Path,
    actions: &[Action],
    found: &Difference,
) -> (Vec<Action>, Difference) {
    // The start of a search for ports depends on the time.
    let mut differs = |actions: &[Action]| {
        (0..TRIES).find_map(|_| check(harness, path, actions, 1, &mut Totals::default()).err())
    };
    let mut best = actions[..=found.at].to_vec();
    // The difference may depend on something that is not repeated: then the whole sequence is
    // returned.
    let Some(mut difference) = differs(&best) else { return (best, found.clone()) };
    best.truncate(difference.at + 1);
    let mut piece = best.len() / 2;
    while piece > 0 {
        let mut at = 0;
        while at < best.len() {
            let mut fewer = best.clone();
            fewer.drain(at..(at + piece).min(best.len()));
            match differs(&fewer) {
                Some(still) => {
                    fewer.truncate(still.at + 1);
                    (best, difference) = (fewer, still);
                }
                None => at += piece,
            }
        }
        piece /= 2;
    }
    for at in 0..best.len() {
        for simpler in simpler(best[at]) {
            let mut changed = best.clone();
            changed[at] = simpler;
            if let Some(still) = differs(&changed)
                && still.at + 1 == changed.len()
            {
                (best, difference) = (changed, still);
            }
        }
    }
    (best, difference)
}

fn simpler(action: Action) -> Vec<Action> {
    let segment = |segment: Segment| {
        [
            Segment { payload: 0, ..segment },
            Segment { sequence: Number::Right, ..segment },
            Segment { acknowledgement: Number::Right, ..segment },
            Segment { tag: Tag::Right, ..segment },
        ]
    };
    match action {
        Action::Request { client, port, service, segment: old } => segment(old)
            .into_iter()
            .map(|segment| Action::Request { client, port, service, segment })
            .chain([Action::Request { client: 0, port: 0, service, segment: old }])
            .collect(),
        Action::Reply { flow, segment: old } => segment(old)
            .into_iter()
            .map(|segment| Action::Reply { flow, segment })
            .chain([Action::Reply { flow: 0, segment: old }])
            .collect(),
        Action::Malformed { damage, sender, segment: old } => {
            segment(old).into_iter().map(|segment| Action::Malformed { damage, sender, segment }).collect()
        }
        Action::Error { sender, segment: old, kind, quoted, fault } => segment(old)
            .into_iter()
            .map(|segment| Action::Error { sender, segment, kind, quoted, fault })
            .collect(),
        Action::Fragments { sender, segment: old, pieces } => segment(old)
            .into_iter()
            .filter(|segment| segment.payload > 0)
            .map(|segment| Action::Fragments { sender, segment, pieces })
            .chain([Action::Fragments { sender, segment: old, pieces: Pieces { again: false, ..pieces } }])
            .collect(),
        Action::Expiring { .. }
        | Action::Foreign { .. }
        | Action::Service { .. }
        | Action::Retire { .. }
        | Action::Wait { .. }
        | Action::Pause { .. }
        | Action::Sweep => Vec::new(),
    }
}
