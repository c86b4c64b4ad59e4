//! One sequence of actions through program and model.

use std::net::{IpAddr, SocketAddr};

use fastrand::Rng;
use traffic_policy_testing::{
    harness::{Device, Half, Harness, Hook, Input, Ran, Spot, Way},
    lab::Family,
    packet::{Packet, Transport, difference, flag},
};

use crate::{
    action::{Action, Flags, Foreign, Segment},
    model::{Expected, Flow, From, Model, NewFlow},
    topology::{self, CLIENTS, Endpoint, FIRST_CLIENT_PORT, POOL},
};

/// A program under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// XDP or TC ingress.
    pub hook: Hook,
    pub family: Family,
}

impl Path {
    pub fn all() -> impl Iterator<Item = Self> {
        Hook::INGRESS.into_iter().flat_map(|hook| Family::BOTH.map(|family| Self { hook, family }))
    }
}

/// Where program and model differ.
#[derive(Clone, Debug)]
pub struct Difference {
    /// Index of the action.
    pub at: usize,
    pub what: String,
    /// What the program was given last, and what it made of it.
    pub packet: Option<(Input, &'static str, Vec<u8>)>,
}

/// What a run consisted of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub packets: u64,
    pub translated: u64,
    pub flows: u64,
    pub unchanged: u64,
}

/// Actions of one sequence.
const LENGTH: usize = 300;
/// The whole table is compared after so many actions: each comparison takes as long as ten packets.
const COMPARED: usize = 16;

/// Runs random sequences until `enough` says so. Returns the first sequence in which program and model differ.
///
/// # Errors
/// The sequence, and where they differ.
pub fn fuzz(
    harness: &mut Harness,
    path: Path,
    rng: &mut Rng,
    totals: &mut Totals,
    mut enough: impl FnMut(&Totals) -> bool,
) -> Result<(), Box<(Vec<Action>, Difference)>> {
    while !enough(totals) {
        let actions: Vec<_> = (0..LENGTH).map(|_| Action::random(rng)).collect();
        if let Err(difference) = check(harness, path, &actions, COMPARED, totals) {
            return Err(Box::new((actions, difference)));
        }
    }
    Ok(())
}

/// Runs one sequence on fresh maps. `compared`: the whole table after so many actions, and at the end.
///
/// # Errors
/// Where program and model differ.
pub fn check(
    harness: &mut Harness,
    path: Path,
    actions: &[Action],
    compared: usize,
    totals: &mut Totals,
) -> Result<(), Difference> {
    harness.set_up(&topology::setup());
    let mut run = Run { harness, path, model: Model::new(path.family), totals, last: None };
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
    last: Option<(Input, &'static str, Vec<u8>)>,
}

fn end(address: SocketAddr) -> (IpAddr, u16) {
    (address.ip(), address.port())
}

fn bits(flags: Flags) -> u8 {
    match flags {
        Flags::Syn => flag::SYN,
        Flags::SynAck => flag::SYN | flag::ACK,
        Flags::Ack => flag::ACK,
        Flags::FinAck => flag::FIN | flag::ACK,
        Flags::RstAck => flag::RST | flag::ACK,
        Flags::Rst => flag::RST,
    }
}

/// A segment or datagram.
fn packet(
    from: SocketAddr,
    to: SocketAddr,
    segment: Segment,
    (sequence, acknowledgement): (u32, u32),
) -> Packet {
    let payload = vec![0x5a; segment.payload.into()];
    let packet = if segment.tcp {
        Packet::tcp(end(from), end(to), bits(segment.flags)).numbers(sequence, acknowledgement)
    } else {
        Packet::udp(end(from), end(to))
    };
    packet.payload(&payload)
}

impl Run<'_> {
    fn act(&mut self, action: Action) -> Result<(), String> {
        match action {
            Action::Request { client, port, service, segment } => {
                let client = self.client(client, port);
                self.request(client, service.into(), segment)
            }
            Action::Reply { flow, segment } => {
                let tcp = segment.tcp;
                let flows: Vec<_> =
                    (0..self.model.flows.len()).filter(|index| self.model.flows[*index].tcp == tcp).collect();
                match flows.len() {
                    0 => Ok(()),
                    count => self.reply(flows[usize::from(flow) % count], segment),
                }
            }
            Action::Foreign { what, client, tcp } => self.foreign(what, self.client(client, 0), tcp),
            Action::Endpoints { service, endpoints } => {
                let service = usize::from(service);
                self.model.services[service].endpoints = endpoints;
                self.harness.put(service as u32 + 1, &self.model.services[service].frontend());
                // As the agent does for slots that are written again.
                self.harness.change_state(|state| state.route = state.route.wrapping_add(1) & 0xffff | 1);
                Ok(())
            }
        }
    }

    fn client(&self, client: u8, port: u8) -> SocketAddr {
        let spot = CLIENTS[usize::from(client) % CLIENTS.len()];
        SocketAddr::new(spot.of(self.path.family), FIRST_CLIENT_PORT + u16::from(port))
    }

    fn run(&mut self, hook: Hook, device: Device, packet: &Packet) -> Ran {
        let input = Input { hook, device, frame: packet.bytes(), segment: 0 };
        let ran = self.harness.input(&input);
        self.totals.packets += 1;
        self.last = Some((input, ran.outcome, ran.frame.clone()));
        ran
    }

    fn request(&mut self, client: SocketAddr, service: usize, segment: Segment) -> Result<(), String> {
        let frontend = self.model.services[service].at(self.path.family);
        let flow = self.model.find(segment.tcp, client, frontend);
        let numbers = self.model.request_numbers(flow, segment);
        let sent = packet(client, frontend, segment, numbers).macs(Spot::Router.mac(), Device::Eth0.mac());
        let expected = self.model.request(flow, service, segment);
        let ran = self.run(self.path.hook, Device::Eth0, &sent);
        match expected {
            Expected::Unchanged => self.unchanged(&sent, &ran),
            Expected::Dropped(one, other) if [one, other].contains(&ran.outcome) => Ok(()),
            Expected::Answered(name) if [name, "dropped-rate-limited"].contains(&ran.outcome) => Ok(()),
            Expected::NotServed if !matches!(ran.outcome, "forwarded" | "delivered") => Ok(()),
            Expected::New(replaced) => {
                self.begun(replaced, client, frontend, service, segment, numbers, &sent, &ran)
            }
            Expected::Translated(index) => {
                self.requested(index, &sent, &ran)?;
                self.model.translated(index, From::Client, segment, numbers.0);
                Ok(())
            }
            Expected::Either(index) => {
                let kept = self.requested(index, &sent, &ran);
                if kept.is_ok() && self.keeps(index)? {
                    self.model.translated(index, From::Client, segment, numbers.0);
                    return Ok(());
                }
                match self.model.new_flow(service, Some(index)) {
                    Expected::New(replaced) => {
                        self.begun(replaced, client, frontend, service, segment, numbers, &sent, &ran)
                    }
                    Expected::Dropped(one, other) if [one, other].contains(&ran.outcome) => Ok(()),
                    Expected::Answered(name) if [name, "dropped-rate-limited"].contains(&ran.outcome) => {
                        Ok(())
                    }
                    expected => Err(format!("{} instead of {expected:?} or of {kept:?}", ran.outcome)),
                }
            }
            expected => Err(format!("{} instead of {expected:?}", ran.outcome)),
        }
    }

    /// Whether a flow's request entry is that of the connection before: a new one has counted this packet alone.
    fn keeps(&self, index: usize) -> Result<bool, String> {
        let flow = &self.model.flows[index];
        let halves = self.harness.flows(self.path.family);
        let request =
            halves.iter().find(|half| is_request_of(half, flow)).ok_or("its request entry is gone")?;
        Ok(request.packets > 1)
    }

    fn unchanged(&mut self, sent: &Packet, ran: &Ran) -> Result<(), String> {
        self.totals.unchanged += 1;
        if !ran.outcome.starts_with("passed") || ran.way != Way::Pass {
            return Err(format!("{} instead of passing it on as it is", ran.outcome));
        }
        difference(&sent.bytes(), &ran.frame).map_or(Ok(()), Err)
    }

    /// A client's packet as it must leave, for this endpoint and source.
    fn translated_request(sent: &Packet, flow: &Flow, family: Family) -> Packet {
        let packet = sent.clone().source(end(flow.source)).destination(end(flow.target(family)));
        match flow.endpoint.way {
            Some((device, router)) => packet.macs(device.mac(), router.mac()).ttl(sent.ttl - 1),
            None => packet,
        }
    }

    fn requested(&mut self, index: usize, sent: &Packet, ran: &Ran) -> Result<(), String> {
        self.totals.translated += 1;
        let flow = &self.model.flows[index];
        let name = if flow.endpoint.way.is_some() { "forwarded" } else { "delivered" };
        if ran.outcome != name {
            return Err(format!("{} instead of {name} by {flow:?}", ran.outcome));
        }
        let wanted = Self::translated_request(sent, flow, self.path.family);
        difference(&wanted.bytes(), &ran.frame).map_or(Ok(()), Err)
    }

    #[expect(clippy::too_many_arguments, reason = "all that a new flow is made of")]
    fn begun(
        &mut self,
        replaced: Option<usize>,
        client: SocketAddr,
        frontend: SocketAddr,
        service: usize,
        segment: Segment,
        numbers: (u32, u32),
        sent: &Packet,
        ran: &Ran,
    ) -> Result<(), String> {
        let candidates = self.model.services[service].candidates();
        if ran.outcome == "dropped-no-snat-port" {
            let full =
                candidates.iter().any(|endpoint| self.model.may_be_exhausted(segment.tcp, client, *endpoint));
            return if full { Ok(()) } else { Err("a port was free towards every endpoint".to_owned()) };
        }
        self.totals.flows += 1;
        let halves = self.harness.flows(self.path.family);
        let protocol = if segment.tcp { 6 } else { 17 };
        let made = halves.iter().find(|half| {
            half.is_request() && half.protocol == protocol && half.from == client && half.to == frontend
        });
        let Some(made) = made else { return Err(format!("{}: no flow was made", ran.outcome)) };
        let of = |endpoint: &&Endpoint| endpoint.spot.of(self.path.family) == made.new_to.ip();
        let Some(endpoint) = candidates.iter().find(of).copied() else {
            return Err(format!("{} is no endpoint of this Service for a new flow", made.new_to));
        };
        let source = made.new_from;
        let address = endpoint.way.map_or(client.ip(), |(device, _)| device.spot().of(self.path.family));
        let port_fits = match endpoint.way {
            Some(_) => POOL.contains(&source.port()),
            None => source.port() == client.port() || POOL.contains(&source.port()),
        };
        if source.ip() != address || !port_fits {
            return Err(format!("{source} is not what the endpoint should see"));
        }
        let sequence = numbers.0;
        let flow = NewFlow { tcp: segment.tcp, service, client, frontend, endpoint, source, sequence };
        self.model.begin(replaced, flow)?;
        let index = self.model.flows.len() - 1;
        self.requested(index, sent, ran)
    }

    fn reply(&mut self, index: usize, segment: Segment) -> Result<(), String> {
        let flow = self.model.flows[index];
        let numbers = flow.numbers(From::Endpoint, segment);
        let sent = packet(flow.target(self.path.family), flow.source, segment, numbers);
        let expected = self.model.reply(index, segment);
        let (ran, sent) = match flow.endpoint.way {
            Some((device, router)) => {
                let sent = sent.macs(router.mac(), device.mac());
                (self.run(self.path.hook, device, &sent), sent)
            }
            None => {
                let sent = sent.macs(Device::Eth0.mac(), Spot::Router.mac());
                (self.run(Hook::Egress, Device::Eth0, &sent), sent)
            }
        };
        if expected == Expected::Unchanged
            || matches!(expected, Expected::Either(_)) && ran.outcome.starts_with("passed")
        {
            return self.unchanged(&sent, &ran);
        }
        self.totals.translated += 1;
        let (name, wanted) = match flow.endpoint.way {
            Some(_) => {
                ("replied", sent.clone().macs(Device::Eth0.mac(), Spot::Router.mac()).ttl(sent.ttl - 1))
            }
            None => ("replied-local", sent.clone()),
        };
        if ran.outcome != name {
            return Err(format!("{} instead of {name} by {flow:?}", ran.outcome));
        }
        let wanted = wanted.source(end(flow.frontend)).destination(end(flow.client));
        if let Some(difference) = difference(&wanted.bytes(), &ran.frame) {
            return Err(difference);
        }
        self.model.translated(index, From::Endpoint, segment, numbers.0);
        Ok(())
    }

    fn foreign(&mut self, what: Foreign, client: SocketAddr, tcp: bool) -> Result<(), String> {
        let family = self.path.family;
        let to = |port| SocketAddr::new(Spot::Node.of(family), port);
        let segment = Segment {
            tcp,
            flags: Flags::Syn,
            sequence: crate::action::Number::Right,
            acknowledgement: crate::action::Number::Right,
            payload: 40,
        };
        // A port that no client of this run has.
        let stranger = SocketAddr::new(client.ip(), 1234);
        let make =
            |port| packet(stranger, to(port), segment, (1, 0)).macs(Spot::Router.mac(), Device::Eth0.mac());
        let node_port = self.model.services[0].port;
        let sent = match what {
            Foreign::OtherPort => make(22),
            Foreign::PoolPort => make(POOL[0]),
            Foreign::Echo => {
                let kind = if family == Family::V4 { 8 } else { 128 };
                let echo = Transport::Icmp { kind, code: 0, rest: [0, 1, 0, 2] };
                Packet::new(stranger.ip(), to(0).ip(), echo).macs(Spot::Router.mac(), Device::Eth0.mac())
            }
            Foreign::LaterFragment => {
                let Some(fragment) = make(node_port).fragments(24).pop() else {
                    return Err("a packet without fragments".to_owned());
                };
                fragment
            }
            Foreign::OtherHost => make(node_port).with(|packet| packet.to = [2, 9, 9, 9, 9, 9]),
            Foreign::Truncated => return self.truncated(&make(node_port)),
        };
        let before = self.harness.flows(family);
        let ran = self.run(self.path.hook, Device::Eth0, &sent);
        self.unchanged(&sent, &ran)?;
        if self.harness.flows(family) == before {
            Ok(())
        } else {
            Err("it changed the flow table".to_owned())
        }
    }

    /// A frame that ends within its transport header.
    fn truncated(&mut self, whole: &Packet) -> Result<(), String> {
        let family = self.path.family;
        let mut frame = whole.bytes();
        frame.truncate(14 + if family == Family::V4 { 20 } else { 40 } + 4);
        let before = self.harness.flows(family);
        let input = Input::new(self.path.hook, frame.clone());
        let ran = self.harness.input(&input);
        self.totals.packets += 1;
        self.totals.unchanged += 1;
        self.last = Some((input, ran.outcome, ran.frame.clone()));
        if !ran.outcome.starts_with("passed") || ran.frame != frame {
            return Err(format!("{} instead of passing it on as it is", ran.outcome));
        }
        if self.harness.flows(family) == before {
            Ok(())
        } else {
            Err("it changed the flow table".to_owned())
        }
    }

    /// The flow table holds the model's flows, each with both entries, and no others.
    fn compare_tables(&self) -> Result<(), String> {
        let halves = self.harness.flows(self.path.family);
        let requests: Vec<_> = halves.iter().filter(|half| half.is_request()).collect();
        for flow in &self.model.flows {
            let Some(request) = requests.iter().find(|half| is_request_of(half, flow)) else {
                return Err(format!("no request entry of {flow:?}"));
            };
            let source = (request.new_from, request.new_to);
            if source != (flow.source, flow.target(self.path.family)) {
                return Err(format!("its request entry makes {source:?} of {flow:?}"));
            }
            if !halves.iter().any(|half| is_reply_of(half, request)) {
                return Err(format!("no reply entry of {flow:?}"));
            }
            let assured = request.state & traffic_policy_ebpf::tcp::ASSURED != 0;
            if !flow.loose && assured != flow.assured {
                return Err(format!("assured: {assured}, but {flow:?}"));
            }
        }
        if requests.len() != self.model.flows.len() {
            return Err(format!("{} request entries of {} flows", requests.len(), self.model.flows.len()));
        }
        for half in halves.iter().filter(|half| !half.is_request()) {
            let stale = (half.protocol == 6, half.to, half.from);
            if !requests.iter().any(|request| is_reply_of(half, request))
                && !self.model.stale.contains(&stale)
            {
                return Err(format!("a reply entry of no flow: {half:?}"));
            }
        }
        Ok(())
    }
}

fn is_request_of(half: &Half, flow: &Flow) -> bool {
    let protocol = if flow.tcp { 6 } else { 17 };
    half.is_request() && half.protocol == protocol && half.from == flow.client && half.to == flow.frontend
}

fn is_reply_of(reply: &Half, request: &Half) -> bool {
    !reply.is_request()
        && reply.protocol == request.protocol
        && (reply.from, reply.to) == (request.new_to, request.new_from)
        && (reply.new_from, reply.new_to) == (request.to, request.from)
}
