//! Execution of one sequence of actions by program and model.

mod errors;
mod foreign;
mod fragments;
mod malformed;
mod offer;
mod replies;
mod requests;
mod tables;
mod time;

use std::{
    collections::HashMap,
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use fastrand::Rng;
use traffic_policy_dataplane::Sweeper;
use traffic_policy_testing::{
    harness::{Device, FlowEntry, Harness, Hook, Input, Ran, Way},
    lab::Family,
    packet::{Packet, difference},
};

pub use self::{fragments::Pieces, tables::sound};
use crate::{
    action::{Action, Point},
    model::{Flow, From, Model},
    segment::{Protocol, Segment},
    topology::{self, CLIENT_PORTS, CLIENTS},
};

/// A program under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// Hook: XDP or TC ingress.
    pub hook: Hook,
    pub family: Family,
}

impl Path {
    pub fn all() -> impl Iterator<Item = Self> {
        Hook::INGRESS.into_iter().flat_map(|hook| Family::BOTH.map(|family| Self { hook, family }))
    }
}

/// Difference between program and model.
#[derive(Clone, Debug)]
pub struct Difference {
    /// Index of the action.
    pub at: usize,
    pub what: String,
    /// The last packet given to the program, and its fate.
    pub packet: Option<(Input, &'static str, Vec<u8>)>,
}

/// Counts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub packets: u64,
    pub translated: u64,
    pub flows: u64,
    pub unchanged: u64,
    /// SCTP: associations that were assured, and restarts that were accepted.
    pub associations: u64,
    pub restarts: u64,
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
///
/// # Errors
/// The sequence, and where they differ.
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

/// Runs one sequence on fresh maps. The whole table is compared after every `compared` actions, and
/// at the end.
///
/// # Errors
/// The first difference between program and model.
pub fn check(
    harness: &mut Harness,
    path: Path,
    actions: &[Action],
    compared: usize,
    totals: &mut Totals,
) -> Result<(), Difference> {
    harness.set_up(&topology::setup());
    let mut run = Run {
        harness,
        path,
        model: Model::new(path.family),
        totals,
        compared,
        last: None,
        identification: 1,
        records: HashMap::new(),
        sweeper: None,
        pause: None,
    };
    for (at, action) in actions.iter().enumerate() {
        let done = run.act(*action).and_then(|()| {
            if (at + 1) % compared == 0 || at + 1 == actions.len() { run.compare_tables() } else { Ok(()) }
        });
        if let Err(what) = done {
            return Err(Difference { at, what, packet: run.last });
        }
    }
    Ok(())
}

struct Run<'a> {
    harness: &'a mut Harness,
    path: Path,
    model: Model,
    totals: &'a mut Totals,
    compared: usize,
    last: Option<(Input, &'static str, Vec<u8>)>,
    /// Identification of the last packet in fragments: an odd number, which [`foreign`] does not
    /// use.
    identification: u16,
    records: HashMap<fragments::Key, fragments::Record>,
    sweeper: Option<Sweeper>,
    /// A pause during the next packet.
    pause: Option<(Point, Duration)>,
}

impl Run<'_> {
    fn act(&mut self, action: Action) -> Result<(), String> {
        match action {
            Action::Request { client, port, service, segment } => {
                let client = self.client(client, port);
                self.request(client, service.into(), segment)
            }
            Action::Reply { flow, segment } => match self.flow(flow, segment.protocol) {
                Some(index) => self.reply(index, segment),
                None => Ok(()),
            },
            Action::Foreign { what, client, protocol } => {
                self.foreign(what, self.client(client, 0), protocol)
            }
            Action::Malformed { damage, sender, segment } => self.malformed(damage, sender, segment),
            Action::Error { sender, segment, kind, quoted, fault } => {
                self.error(sender, segment, kind, quoted, fault)
            }
            Action::Fragments { sender, segment, pieces } => self.fragments(sender, segment, pieces),
            Action::Wait { jiffies } => {
                self.wait(jiffies);
                Ok(())
            }
            Action::Pause { milliseconds, point } => {
                self.pause = Some((point, Duration::from_millis(milliseconds.into())));
                Ok(())
            }
            Action::Sweep => self.sweep(None).map(drop),
            Action::Retire { service, endpoint } => self.retire(service.into(), endpoint.into()),
            Action::Expiring { ttl, sender, protocol } => self.expiring(ttl, sender, protocol),
            Action::Service { service, change } => {
                let of = &mut self.model.services[usize::from(service)];
                change.apply(of, u32::from(service) + 1, self.harness);
                Ok(())
            }
        }
    }

    fn client(&self, client: u8, port: u8) -> SocketAddr {
        let spot = CLIENTS[usize::from(client) % CLIENTS.len()];
        SocketAddr::new(spot.of(self.path.family), CLIENT_PORTS[usize::from(port) % CLIENT_PORTS.len()])
    }

    /// Returns a flow of this protocol by its age.
    fn flow(&self, flow: u8, protocol: Protocol) -> Option<usize> {
        let flows: Vec<_> = (0..self.model.flows.len())
            .filter(|index| self.model.flows[*index].protocol == protocol)
            .collect();
        flows.get(usize::from(flow).checked_rem(flows.len())?).copied()
    }

    fn run(&mut self, hook: Hook, device: Device, packet: &Packet) -> Ran {
        self.run_frame(hook, device, packet.bytes())
    }

    fn run_frame(&mut self, hook: Hook, device: Device, frame: Vec<u8>) -> Ran {
        let input = Input { device, ..Input::new(hook, frame) };
        // The model has no such memory, and its time passes without the kernel's.
        self.harness.forget_failed_searches();
        self.pause_at(Point::Before);
        self.model.given = Instant::now();
        self.pause_at(Point::Given);
        let ran = self.harness.input(&input);
        self.pause_at(Point::Seen);
        self.totals.packets += 1;
        self.last = Some((input, ran.outcome, ran.frame.clone()));
        ran
    }

    /// Sleeps if a pause is due here, as if another process had this CPU.
    fn pause_at(&mut self, point: Point) {
        if let Some((_, time)) = self.pause.take_if(|(at, _)| *at == point) {
            // Programs read the kernel's clock, which only real time advances.
            thread::sleep(time);
        }
    }

    fn unchanged(&mut self, sent: &[u8], ran: &Ran) -> Result<(), String> {
        self.totals.unchanged += 1;
        if !ran.outcome.starts_with("passed") || ran.way != Way::Pass {
            return Err(format!("{} instead of passing it on as it is", ran.outcome));
        }
        difference(sent, &ran.frame).map_or(Ok(()), Err)
    }

    /// Records a packet that was translated, with its numbers, as it was sent.
    fn translated(
        &mut self,
        index: usize,
        from: From,
        (segment, numbers): (Segment, (u32, u32)),
        sent: &Packet,
    ) -> Result<(), String> {
        let begins = match (from, self.model.begins_anew(index, segment, numbers)) {
            (From::Endpoint, _) => false,
            (From::Client, Some(begins)) => begins,
            (From::Client, None) => self.request_entry(index)?.tags.0 == numbers.1,
        };
        let before = self.model.flows[index];
        self.model.translated(index, from, segment, numbers, begins);
        let (before, after) = (before.association, self.model.flows[index].association);
        self.totals.associations += u64::from(after.assured && !before.assured);
        self.totals.restarts += u64::from(before.assured && before.client != after.client);
        self.count(index, from, sent);
        Ok(())
    }

    /// Returns the request entry of a flow.
    fn request_entry(&self, index: usize) -> Result<FlowEntry, String> {
        let flow = &self.model.flows[index];
        let entries = self.harness.flows(self.path.family);
        let request = entries.iter().find(|entry| flow.has_request(entry));
        request.copied().ok_or_else(|| "its request entry is gone".to_owned())
    }

    /// Counts a packet that was translated.
    fn count(&mut self, index: usize, from: From, sent: &Packet) {
        let now = self.model.now();
        self.model.flows[index].count(from, sent.bytes().len() as u64 - 14, now);
    }

    /// Returns the hook and device of packets from a flow's endpoint.
    fn endpoint_side(&self, flow: &Flow) -> (Hook, Device) {
        match flow.endpoint.way {
            Some((device, _)) => (self.path.hook, device),
            None => (Hook::Egress, Device::Eth0),
        }
    }

    /// Verifies that a frame passes unchanged.
    fn passes(&mut self, hook: Hook, device: Device, frame: &[u8]) -> Result<(), String> {
        let before = self.watched();
        let ran = self.run_frame(hook, device, frame.to_vec());
        self.unchanged(frame, &ran)?;
        self.untouched(before)
    }

    /// Returns the flow table at times, to check whether the next packet touches it; reading it
    /// takes long.
    fn watched(&self) -> Option<Vec<FlowEntry>> {
        (self.compared == 1 || self.totals.packets.is_multiple_of(8)).then(|| self.entries())
    }

    fn untouched(&self, before: Option<Vec<FlowEntry>>) -> Result<(), String> {
        match before {
            Some(before) if self.entries() != before => Err("it changed the flow table".to_owned()),
            _ => Ok(()),
        }
    }

    /// Returns the flow table without next hops, which are resolved by the first packet that needs
    /// one.
    fn entries(&self) -> Vec<FlowEntry> {
        let entries = self.harness.flows(self.path.family).into_iter();
        entries.map(|entry| FlowEntry { hop: 0, epoch: 0, ..entry }).collect()
    }
}
