//! Program and model beside each other: what the one does, the other follows.

use std::{
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use traffic_policy_testing::{
    harness::{Action, Device, FlowEntry, Harness, Hook, Input, Ran},
    packet::{Packet, difference},
};

use super::entries;
use crate::{
    action::Point,
    model::{Flow, From, Model},
    path::Path,
    segment::{Protocol, Segment},
    topology::{CLIENT_PORTS, CLIENTS},
    totals::Totals,
};

/// The last packet given to the program, and its fate.
pub type Last = (Input, &'static str, Vec<u8>);

/// Both, and what a run has counted.
pub struct Compared<'a> {
    pub harness: &'a mut Harness,
    pub path: Path,
    pub model: Model,
    pub totals: &'a mut Totals,
    /// Number of actions after which the whole table is compared.
    pub every: usize,
    pub last: Option<Last>,
    /// A pause during the next packet.
    pub pause: Option<(Point, Duration)>,
}

impl Compared<'_> {
    /// Returns the address of a client, and one of its ports.
    pub fn client(&self, client: u8, port: u8) -> SocketAddr {
        let spot = CLIENTS[usize::from(client) % CLIENTS.len()];
        SocketAddr::new(spot.of(self.path.family), CLIENT_PORTS[usize::from(port) % CLIENT_PORTS.len()])
    }

    /// Returns a flow of this protocol by its age.
    pub fn flow(&self, flow: u8, protocol: Protocol) -> Option<usize> {
        let flows: Vec<_> = (0..self.model.flows.len())
            .filter(|index| self.model.flows[*index].protocol == protocol)
            .collect();
        flows.get(usize::from(flow).checked_rem(flows.len())?).copied()
    }

    /// Gives a packet to the program.
    pub fn run(&mut self, hook: Hook, device: Device, packet: &Packet) -> Ran {
        self.run_frame(hook, device, packet.bytes())
    }

    pub fn run_frame(&mut self, hook: Hook, device: Device, frame: Vec<u8>) -> Ran {
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

    /// Verifies that a packet was passed on unchanged.
    pub fn unchanged(&mut self, sent: &[u8], ran: &Ran) -> Result<(), String> {
        self.totals.unchanged += 1;
        if !ran.outcome.starts_with("passed") || ran.action != Action::Pass {
            return Err(format!("{} instead of passing it on as it is", ran.outcome));
        }
        difference(sent, &ran.frame).map_or(Ok(()), Err)
    }

    /// Records a packet that was translated, with its numbers, as it was sent.
    pub fn translated(
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
    pub fn request_entry(&self, index: usize) -> Result<FlowEntry, String> {
        let flow = &self.model.flows[index];
        let entries = self.harness.flows(self.path.family);
        let request = entries.iter().find(|entry| entries::is_request_of(entry, flow));
        request.copied().ok_or_else(|| "its request entry is gone".to_owned())
    }

    /// Counts a packet that was translated.
    pub fn count(&mut self, index: usize, from: From, sent: &Packet) {
        let now = self.model.now();
        self.model.flows[index].count(from, sent.bytes().len() as u64 - 14, now);
    }

    /// Returns the hook and device of packets from a flow's endpoint.
    pub fn endpoint_side(&self, flow: &Flow) -> (Hook, Device) {
        match flow.endpoint.route {
            Some((device, _)) => (self.path.hook, device),
            None => (Hook::Egress, Device::Eth0),
        }
    }

    /// Verifies that a frame passes unchanged.
    pub fn passes(&mut self, hook: Hook, device: Device, frame: &[u8]) -> Result<(), String> {
        let before = self.watched();
        let ran = self.run_frame(hook, device, frame.to_vec());
        self.unchanged(frame, &ran)?;
        self.untouched(before)
    }

    /// Returns the flow table at times, to check whether the next packet touches it; reading it
    /// takes long.
    pub fn watched(&self) -> Option<Vec<FlowEntry>> {
        (self.every == 1 || self.totals.packets.is_multiple_of(8)).then(|| self.entries())
    }

    pub fn untouched(&self, before: Option<Vec<FlowEntry>>) -> Result<(), String> {
        match before {
            Some(before) if self.entries() != before => Err("it changed the flow table".to_owned()),
            _ => Ok(()),
        }
    }

    /// Returns the flow table without next hops, which are resolved by the first packet that needs
    /// one.
    pub fn entries(&self) -> Vec<FlowEntry> {
        let entries = self.harness.flows(self.path.family).into_iter();
        entries.map(|entry| FlowEntry { hop: 0, epoch: 0, ..entry }).collect()
    }
}
