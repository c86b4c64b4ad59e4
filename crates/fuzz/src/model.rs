//! The reference model: flows, and the required outcome of a packet.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    time::Instant,
};

use traffic_policy_testing::{
    harness::{HZ, Spot},
    lab::Family,
};

use crate::{
    segment::{Flags, Protocol, Segment},
    topology::{Endpoint, SERVICES, SNAT_PORTS, Service, TARGET},
};

mod affinity;
mod age;
mod association;
mod flow;
mod moment;
mod side;

pub use self::{
    affinity::duration,
    age::{Fate, STEPS, Stale, TIMEOUTS},
    association::Association,
    flow::{Count, Ended, Flow, Host},
    moment::Moment,
    side::From,
};

/// Jiffies without a packet of an assured association after which an INIT chooses an endpoint anew:
/// a HEARTBEAT, which is due every 30 seconds (RFC 9260 section 8.3), is overdue.
const OVERDUE: u64 = 45 * HZ as u64;
/// Jiffies after which an INIT with another tag is a new attempt: before the endpoint has answered
/// the first one, as for a SYN; and before the client has returned the cookie, which it does within
/// RTO.Initial.
const ANSWER_OVERDUE: u64 = HZ as u64 / 4;
const COOKIE_OVERDUE: u64 = 3 * HZ as u64;

/// The fate that the model demands of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// Passed on unchanged, without a change of state.
    Unchanged,
    /// Dropped, with the first or the second outcome.
    Dropped(&'static str, &'static str),
    /// Answered by the node, with this outcome; or dropped, as answers are limited.
    Answered(&'static str),
    /// Any of the above: the node serves no client here.
    NotServed,
    /// The first packet of a new flow, in place of this one if there is one.
    New(Option<usize>),
    /// Translated as the flow requires.
    Translated(usize),
    /// Translated as the flow requires; otherwise a request begins anew, and a reply is passed on
    /// unchanged.
    Either(usize),
}

/// The state that the node must remember.
#[derive(Clone, Debug)]
pub struct Model {
    pub family: Family,
    pub services: [Service; SERVICES.len()],
    pub flows: Vec<Flow>,
    pub stale: Vec<Stale>,
    /// Jiffies since the beginning, without those that the run itself takes.
    pub clock: u64,
    /// Time just before the last packet was given to a program, which may have seen it at any time
    /// since.
    pub given: Instant,
    connections: u32,
    affinity: HashMap<affinity::Key, affinity::Held>,
}

impl Model {
    pub fn new(family: Family) -> Self {
        Self {
            family,
            services: SERVICES,
            flows: Vec::new(),
            stale: Vec::new(),
            clock: 0,
            given: Instant::now(),
            connections: 0,
            affinity: HashMap::new(),
        }
    }

    /// Returns the moment at which the last packet was given to a program.
    pub fn now(&self) -> Moment {
        Moment { clock: self.clock, given: self.given }
    }

    /// Returns the flow of a client's packets to a Service.
    pub fn find(&self, protocol: Protocol, client: SocketAddr, frontend: SocketAddr) -> Option<usize> {
        self.flows
            .iter()
            .position(|flow| (flow.protocol, flow.client, flow.frontend) == (protocol, client, frontend))
    }

    /// Returns the numbers of a client's packet: see [`packet`][crate::segment::packet].
    pub fn request_numbers(&self, flow: Option<usize>, segment: Segment) -> (u32, u32) {
        match flow {
            Some(index) => self.flows[index].numbers(From::Client, segment),
            None if segment.protocol == Protocol::Sctp => self.association().tags(From::Client, segment),
            None => (segment.sequence.of(self.initial()), segment.acknowledgement.of(1)),
        }
    }

    /// Returns the next association, before its first packet.
    fn association(&self) -> Association {
        Association::new(0xc11e_0000 + (self.connections << 4), 0x0e0d_0000 + (self.connections << 4))
    }

    /// Returns the initial number of the next connection: numbers wrap soon.
    fn initial(&self) -> u32 {
        0xffff_ff00_u32.wrapping_add(self.connections.wrapping_mul(0x0101_0101))
    }

    /// Returns the fate of a client's packet that a program has already decided on: before that the
    /// elapsed time is unknown.
    pub fn request(
        &self,
        client: IpAddr,
        flow: Option<usize>,
        service: usize,
        (segment, numbers): (Segment, (u32, u32)),
    ) -> Expected {
        let of = &self.services[service];
        let udp = segment.protocol == Protocol::Udp;
        let opens = match segment.protocol {
            Protocol::Tcp => segment.flags == Flags::Syn,
            Protocol::Udp => true,
            Protocol::Sctp => association::opens(segment, numbers.0),
        };
        if let Some(index) = flow {
            let flow = &self.flows[index];
            // Whether a loosely followed flow is assured is undetermined.
            if flow.removed && (udp || opens && (!flow.assured || flow.loose)) {
                return if flow.loose {
                    Expected::Either(index)
                } else {
                    self.new_flow(client, service, Some(index))
                };
            }
            if udp || !opens {
                return Expected::Translated(index);
            }
            let forgotten = match segment.protocol {
                Protocol::Sctp if flow.assured => flow.belonged.is_past(OVERDUE, self.clock),
                Protocol::Tcp if flow.may_be_forgotten(self.clock) => None,
                _ => Some(false),
            };
            return match (flow.ended, forgotten) {
                (Ended::Yes, _) | (Ended::No, Some(true)) => self.new_flow(client, service, Some(index)),
                (Ended::Unspecified, _) | (_, None) => Expected::Either(index),
                (Ended::No, Some(false)) => Expected::Translated(index),
            };
        }
        if !of.there {
            return Expected::Unchanged;
        }
        if !opens {
            if of.candidates().is_empty() || !of.allows(client, self.family) {
                return Expected::NotServed;
            }
            // No ABORT is made here for an association that is not known.
            let acknowledges = segment.protocol == Protocol::Tcp
                && !matches!(segment.flags, Flags::Syn | Flags::Rst | Flags::RstAck);
            return if of.address != Spot::Node && acknowledges {
                Expected::Answered("reset-no-flow")
            } else {
                Expected::Unchanged
            };
        }
        self.new_flow(client, service, None)
    }

    /// Returns the fate of a packet that begins a flow.
    pub fn new_flow(&self, client: IpAddr, service: usize, replaced: Option<usize>) -> Expected {
        let service = &self.services[service];
        if !service.there {
            return Expected::Unchanged;
        }
        if !service.allows(client, self.family) {
            return Expected::Dropped("dropped-source-range", "dropped-source-range");
        }
        if !service.candidates().is_empty() {
            return Expected::New(replaced);
        }
        if service.endpoints == 0 {
            return Expected::Answered("rejected-no-endpoint");
        }
        Expected::Dropped("dropped-no-local-endpoint", "dropped-no-local-endpoint")
    }

    /// Returns the fate of an endpoint's packet.
    pub fn reply(&self, index: usize, (segment, numbers): (Segment, (u32, u32))) -> Expected {
        let flow = &self.flows[index];
        if segment.protocol == Protocol::Sctp {
            let association = &flow.association;
            let alive = association.assured && !association.is_over();
            let belongs = association.has(From::Endpoint, segment, numbers.0)
                || association.accepts_restart(segment, numbers.0);
            // What does not belong to a living association may belong to another one, to the
            // endpoint itself.
            return if alive || belongs { Expected::Translated(index) } else { Expected::Unchanged };
        }
        let exact = segment.sequence.is_right()
            && segment.acknowledgement.is_right()
            && !matches!(segment.flags, Flags::Syn | Flags::Rst);
        let certain = !flow.loose && flow.ended == Ended::No;
        if segment.protocol == Protocol::Udp || certain && (flow.assured || flow.answered && exact) {
            return Expected::Translated(index);
        }
        if flow.answered || flow.loose {
            // The client has not yet proved its position: a packet that is not the endpoint's for
            // certain may belong to another connection.
            return Expected::Either(index);
        }
        // The endpoint has not answered yet: only a possible answer to the SYN counts as one.
        match segment.flags {
            Flags::SynAck | Flags::RstAck if segment.acknowledgement.is_right() => {
                Expected::Translated(index)
            }
            _ => Expected::Unchanged,
        }
    }

    /// Whether a new flow of this client may find all SNAT ports taken towards an endpoint: by
    /// flows, or by entries that replaced flows have left. A flow that was closed long ago gives
    /// way to others, but not to its own successor.
    pub fn may_be_exhausted(
        &self,
        protocol: Protocol,
        client: SocketAddr,
        endpoint: Endpoint,
        replaced: Option<usize>,
    ) -> bool {
        let target = SocketAddr::new(endpoint.spot.of(self.family), TARGET);
        // An endpoint on this node sees the client's own address.
        let address = endpoint.route.map_or(client.ip(), |(device, _)| device.spot().of(self.family));
        let takes = |of: Protocol, source: SocketAddr, to: SocketAddr, port: u16| {
            (of, source, to) == (protocol, SocketAddr::new(address, port), target)
        };
        SNAT_PORTS.iter().all(|port| {
            self.flows.iter().enumerate().any(|(index, flow)| {
                takes(flow.protocol, flow.source, flow.target(self.family), *port)
                    && (!flow.gives_way(self.clock) || replaced == Some(index))
            }) || self.stale.iter().any(|each| takes(each.protocol, each.source, each.target, *port))
        })
    }

    /// Takes over a new flow as the program has made it, or returns why it is wrong.
    pub fn begin(&mut self, replaced: Option<usize>, flow: NewFlow) -> Result<(), String> {
        let target = flow.target(self.family);
        let key = (flow.protocol, flow.source, flow.endpoint.spot);
        let rival =
            self.flows.iter().position(|each| (each.protocol, each.source, each.endpoint.spot) == key);
        let rival = rival.filter(|rival| Some(*rival) != replaced);
        if let Some(rival) = rival
            && self.flows[rival].ended == Ended::No
            && !self.flows[rival].may_give_way(self.clock)
        {
            return Err(format!("{} towards {target} is {:?}'s", flow.source, self.flows[rival]));
        }
        if let Some(index) = replaced {
            self.leave(index);
        }
        let mut gone: Vec<usize> = replaced.into_iter().chain(rival).collect();
        gone.sort_unstable();
        for index in gone.into_iter().rev() {
            self.flows.remove(index);
        }
        self.stale.retain(|each| !each.is(flow.protocol, flow.source, target));
        let initial = flow.numbers.0;
        let mut association = self.association();
        association.client = flow.numbers.1;
        let endpoint_initial = 0x7fff_ffc0_u32.wrapping_add(self.connections << 4);
        self.connections += 1;
        let host =
            |initial: u32| Host { initial, next: initial.wrapping_add(1), acknowledged: 0, fin: false };
        self.flows.push(Flow {
            protocol: flow.protocol,
            service: flow.service,
            client: flow.client,
            frontend: flow.frontend,
            endpoint: flow.endpoint,
            source: flow.source,
            answered: false,
            assured: false,
            began: self.now(),
            heard: None,
            ended: Ended::No,
            loose: false,
            hosts: [host(initial), host(endpoint_initial)],
            association,
            counts: [Count::default(); 2],
            last: [self.clock; 2],
            belonged: self.now(),
            belongs: false,
            syn: None,
            reset: false,
            removed: false,
            found_over: 0,
            noticed: false,
        });
        Ok(())
    }

    /// Marks an endpoint of a Service as taking no more new flows.
    pub fn retire(&mut self, service: usize, endpoint: Endpoint) {
        for flow in &mut self.flows {
            flow.removed |= (flow.service, flow.endpoint) == (service, endpoint);
        }
    }

    /// Records a packet of a flow that was seen but not forwarded: a sweep that found the flow over
    /// begins anew.
    pub fn seen(&mut self, index: usize, from: From, segment: Segment, numbers: (u32, u32)) {
        self.translated(index, from, segment, numbers, false);
        self.flows[index].found_over = 0;
        // It does not keep the flow alive.
        self.flows[index].belongs = false;
    }

    /// Leaves the reply entry of a flow behind. Only datagrams have no connection that they could
    /// be mistaken for.
    fn leave(&mut self, index: usize) {
        let old = &self.flows[index];
        if old.protocol != Protocol::Udp {
            return;
        }
        self.stale.push(Stale {
            protocol: old.protocol,
            source: old.source,
            target: old.target(self.family),
            last: old.last[From::Endpoint as usize],
            found_over: 0,
        });
    }

    /// Records a packet of a flow that was translated. `begins`: see [`Self::begins_anew`].
    pub fn translated(
        &mut self,
        index: usize,
        from: From,
        segment: Segment,
        numbers: (u32, u32),
        begins: bool,
    ) {
        let now = self.now();
        self.flows[index].follow(from, segment, numbers, begins, now);
    }

    /// Whether a client's packet is an INIT that begins the association of a flow anew, or is sent
    /// again, before the association is assured; `None` if that depends on the time that the
    /// program has seen pass.
    pub fn begins_anew(&self, index: usize, segment: Segment, (tag, initiate): (u32, u32)) -> Option<bool> {
        let flow = &self.flows[index];
        if segment.protocol != Protocol::Sctp || flow.assured || !association::opens(segment, tag) {
            return Some(false);
        }
        if flow.association.client == initiate {
            return Some(true);
        }
        let patience = if flow.answered { COOKIE_OVERDUE } else { ANSWER_OVERDUE };
        flow.belonged.is_past(patience, self.clock)
    }
}

/// A flow as the program has made it.
#[derive(Clone, Copy, Debug)]
pub struct NewFlow {
    pub protocol: Protocol,
    pub service: usize,
    pub client: SocketAddr,
    pub frontend: SocketAddr,
    pub endpoint: Endpoint,
    pub source: SocketAddr,
    /// Numbers of its first packet.
    pub numbers: (u32, u32),
}

impl NewFlow {
    pub fn target(&self, family: Family) -> SocketAddr {
        SocketAddr::new(self.endpoint.spot.of(family), TARGET)
    }
}
