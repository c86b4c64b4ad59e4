//! Execution of one sequence of actions by program and model.
//!
//! ```text
//! action → offer: the packet → program ┐
//!                              model ──┴→ requests, replies, …: equal? → taken over by the model
//! ```

mod compared;
mod entries;
mod errors;
mod foreign;
mod fragments;
mod malformed;
mod offer;
mod replies;
mod requests;
mod tables;
mod time;

use std::time::Duration;

use fastrand::Rng;
use traffic_policy_testing::harness::Harness;

pub use self::tables::sound;
use self::{
    compared::{Compared, Last},
    fragments::Fragments,
    time::Sweeps,
};
use crate::{action::Action, model::Model, path::Path, segment::Protocol, topology, totals::Totals};

/// Difference between program and model.
#[derive(Clone, Debug)]
pub struct Difference {
    /// Index of the action.
    pub at: usize,
    pub what: String,
    pub packet: Option<Last>,
}

/// Number of actions of one sequence.
const LENGTH: usize = 300;
/// Exclusive maximum number of pauses in one sequence.
const PAUSES: usize = 10;
/// Number of actions after which the whole table is compared: each comparison takes as long as ten
/// packets.
const COMPARED: usize = 16;

/// Runs random sequences until `enough` returns true, with an occasional [`Action::Pause`] if
/// `pauses` is set. Returns the first sequence in which program and model differ.
pub fn fuzz(
    harness: &mut Harness,
    path: Path,
    rng: &mut Rng,
    totals: &mut Totals,
    pauses: bool,
    mut enough: impl FnMut(&Totals) -> bool,
) -> Result<(), Box<(Vec<Action>, Difference)>> {
    while !enough(totals) {
        let favourite = Protocol::favourite(rng);
        let mut actions: Vec<_> = (0..LENGTH).map(|_| Action::random(rng, favourite)).collect();
        if pauses {
            for _ in 0..rng.usize(..PAUSES) {
                actions.insert(rng.usize(..LENGTH), Action::pause(rng));
            }
        }
        if let Err(difference) = check(harness, path, &actions, COMPARED, totals) {
            return Err(Box::new((actions, difference)));
        }
    }
    Ok(())
}

/// Runs one sequence on fresh maps. The whole table is compared after every `every` actions, and
/// at the end.
pub fn check(
    harness: &mut Harness,
    path: Path,
    actions: &[Action],
    every: usize,
    totals: &mut Totals,
) -> Result<(), Difference> {
    harness.set_up(&topology::setup());
    let model = Model::new(path.family);
    let compared = Compared { harness, path, model, totals, every, last: None, pause: None };
    let mut run = Run { compared, fragments: Fragments::new(), sweeps: Sweeps::default() };
    for (at, action) in actions.iter().enumerate() {
        let done = run.act(*action).and_then(|()| {
            let due = (at + 1) % every == 0 || at + 1 == actions.len();
            if due { tables::compare(&run.compared) } else { Ok(()) }
        });
        if let Err(what) = done {
            return Err(Difference { at, what, packet: run.compared.last });
        }
    }
    Ok(())
}

/// A sequence that is being run: each kind of action has a module of its own.
struct Run<'a> {
    compared: Compared<'a>,
    fragments: Fragments,
    sweeps: Sweeps,
}

impl Run<'_> {
    fn act(&mut self, action: Action) -> Result<(), String> {
        let Self { compared, fragments, sweeps } = self;
        match action {
            Action::Request { client, port, service, segment } => {
                let client = compared.client(client, port);
                requests::send(compared, client, service.into(), segment)
            }
            Action::Reply { flow, segment } => match compared.flow(flow, segment.protocol) {
                Some(index) => replies::send(compared, index, segment),
                None => Ok(()),
            },
            Action::Foreign { what, client, protocol } => {
                let client = compared.client(client, 0);
                foreign::send(compared, what, client, protocol)
            }
            Action::Malformed { damage, sender, segment } => {
                malformed::send(compared, damage, sender, segment)
            }
            Action::Error { sender, segment, kind, quoted, fault } => {
                errors::send(compared, sender, segment, kind, quoted, fault)
            }
            Action::Fragments { sender, segment, pieces } => {
                fragments.send(compared, sender, segment, pieces)
            }
            Action::Wait { jiffies } => {
                time::wait(compared, jiffies);
                Ok(())
            }
            Action::Pause { milliseconds, point } => {
                compared.pause = Some((point, Duration::from_millis(milliseconds.into())));
                Ok(())
            }
            Action::Sweep => sweeps.sweep(compared, None).map(drop),
            Action::Retire { service, endpoint } => sweeps.retire(compared, service.into(), endpoint.into()),
            Action::Expiring { ttl, sender, protocol } => {
                malformed::send_expiring(compared, ttl, sender, protocol)
            }
            Action::Service { service, change } => {
                let of = &mut compared.model.services[usize::from(service)];
                change.apply(of, u32::from(service) + 1, compared.harness);
                Ok(())
            }
        }
    }
}
