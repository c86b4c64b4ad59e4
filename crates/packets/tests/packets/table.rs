//! Cases as rows: the content of the maps, then packets with their outcome by name and the packet
//! that results. One row serves XDP and TC, both families, TCP and UDP, wherever its meaning is the
//! same.

use std::net::IpAddr;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use traffic_policy_testing::harness::{self, Action, Device, Harness, Hook, Input, SNAT_PORT, Setup, Spot};
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::packet::{Packet, difference, flag, render};

pub(crate) const CLIENT_PORT: u16 = 40000;
pub(crate) const PORT: u16 = 30080;
pub(crate) const ENDPOINT_PORT: u16 = 8080;

/// A column of the table: the terms in which a row is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    pub(crate) hook: Hook,
    pub(crate) family: Family,
    pub(crate) tcp: bool,
}

impl Terms {
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        Hook::INGRESS.into_iter().flat_map(|hook| {
            Family::BOTH
                .into_iter()
                .flat_map(move |family| [true, false].map(|tcp| Self { hook, family, tcp }))
        })
    }

    pub(crate) fn xdp(self) -> bool {
        self.hook == Hook::Xdp
    }

    pub(crate) fn v4(self) -> bool {
        self.family == Family::V4
    }

    pub(crate) fn at(self, (spot, port): (Spot, u16)) -> (IpAddr, u16) {
        (spot.of(self.family), port)
    }

    /// A SYN or a datagram, with MAC addresses unset.
    pub(crate) fn packet(self, from: (Spot, u16), to: (Spot, u16)) -> Packet {
        let (from, to) = (self.at(from), self.at(to));
        if self.tcp { Packet::tcp(from, to, flag::SYN) } else { Packet::udp(from, to) }
    }

    /// The first packet of the client, as the router sends it to eth0.
    pub(crate) fn request(self, to: (Spot, u16)) -> Packet {
        self.packet((Spot::Client, CLIENT_PORT), to).macs(Spot::Router.mac(), Device::Eth0.mac())
    }

    /// The same packet for an endpoint on another node, as it leaves by `device` to `router`.
    pub(crate) fn forwarded(
        self,
        to: (Spot, u16),
        endpoint: (Spot, u16),
        device: Device,
        router: Spot,
    ) -> Packet {
        self.request(to)
            .source(self.at((device.spot(), SNAT_PORT)))
            .destination(self.at(endpoint))
            .macs(device.mac(), router.mac())
            .ttl(63)
    }

    /// A SYN-ACK or a datagram back to the SNAT port, as `router` sends it to `device`.
    pub(crate) fn reply(self, endpoint: (Spot, u16), device: Device, router: Spot) -> Packet {
        self.answer(endpoint, (device.spot(), SNAT_PORT)).macs(router.mac(), device.mac())
    }

    /// A SYN-ACK or a datagram.
    pub(crate) fn answer(self, from: (Spot, u16), to: (Spot, u16)) -> Packet {
        let (from, to) = (self.at(from), self.at(to));
        if self.tcp {
            Packet::tcp(from, to, flag::SYN | flag::ACK).numbers(5000, 1001)
        } else {
            Packet::udp(from, to).payload(b"answer")
        }
    }

    /// The reply of [`Self::reply`] as the client receives it.
    pub(crate) fn replied(self, from: (Spot, u16)) -> Packet {
        self.answer(from, (Spot::Client, CLIENT_PORT)).macs(Device::Eth0.mac(), Spot::Router.mac()).ttl(63)
    }
}

/// The expected frame after the programs have seen a packet.
#[derive(Clone, Debug)]
enum Becomes {
    Itself,
    Other(Vec<u8>),
    /// The packet is dropped, so its frame does not matter.
    Nothing,
}

/// One packet of a case.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    frame: Vec<u8>,
    device: Device,
    egress: bool,
    segment: u32,
    mark: u32,
    outcome: &'static str,
    becomes: Becomes,
}

impl Step {
    /// A packet that arrives on eth0 and is passed unchanged.
    pub(crate) fn passed(packet: &Packet, outcome: &'static str) -> Self {
        Self::frame(packet.bytes(), outcome)
    }

    /// A variant of [`Self::passed`] for any bytes.
    pub(crate) fn frame(frame: Vec<u8>, outcome: &'static str) -> Self {
        let (device, becomes) = (Device::Eth0, Becomes::Itself);
        Self { frame, device, egress: false, segment: 0, mark: 0, outcome, becomes }
    }

    /// A packet that becomes another one.
    pub(crate) fn new(packet: &Packet, outcome: &'static str, becomes: &Packet) -> Self {
        Self { becomes: Becomes::Other(becomes.bytes()), ..Self::passed(packet, outcome) }
    }

    /// A variant of [`Self::new`] with the same bytes after both packets.
    pub(crate) fn with_trailer(
        packet: &Packet,
        outcome: &'static str,
        becomes: &Packet,
        trailer: &[u8],
    ) -> Self {
        let frame = [&packet.bytes(), trailer].concat();
        Self { becomes: Becomes::Other([&becomes.bytes(), trailer].concat()), ..Self::frame(frame, outcome) }
    }

    pub(crate) fn dropped(packet: &Packet, outcome: &'static str) -> Self {
        Self { becomes: Becomes::Nothing, ..Self::passed(packet, outcome) }
    }

    /// Makes the packet arrive on another device.
    pub(crate) fn by(self, device: Device) -> Self {
        Self { device, ..self }
    }

    /// Makes the packet leave by eth0: it is seen at TC egress, whatever the column.
    pub(crate) fn leaving(self) -> Self {
        Self { egress: true, ..self }
    }

    /// Makes the packet an aggregate of segments with this much payload, for TC.
    pub(crate) fn segments(self, segment: u32) -> Self {
        Self { segment, ..self }
    }

    /// Gives the packet a mark, for TC.
    pub(crate) fn marked(self, mark: u32) -> Self {
        Self { mark, ..self }
    }

    #[track_caller]
    pub(crate) fn run(&self, harness: &Harness, terms: Terms) {
        let hook = if self.egress { Hook::Egress } else { terms.hook };
        let segment = if terms.xdp() { 0 } else { self.segment };
        let input = Input { hook, device: self.device, frame: self.frame.clone(), segment, mark: self.mark };
        let ran = harness.input(&input);
        ran.expect(self.outcome);
        let expected = match &self.becomes {
            Becomes::Nothing => return,
            Becomes::Itself => self.frame.clone(),
            Becomes::Other(frame) => frame.clone(),
        };
        if let Some(difference) = difference(&expected, &ran.frame) {
            panic!("{}: {difference}", self.outcome);
        }
        // If the neighbour is not resolved, the kernel writes the MAC addresses afterwards.
        let back = hook == Hook::Xdp && expected.get(6..12) == Some(&self.device.mac()[..]);
        if matches!(ran.action, Action::Back | Action::Redirect) {
            assert_eq!(
                ran.action,
                if back { Action::Back } else { Action::Redirect },
                "{}",
                render(&expected)
            );
        }
    }
}

/// One row.
pub(crate) struct Case {
    what: &'static str,
    setup: Setup,
    steps: Vec<Step>,
}

impl Case {
    pub(crate) fn new(what: &'static str, setup: Setup, steps: impl IntoIterator<Item = Step>) -> Self {
        Self { what, setup, steps: steps.into_iter().collect() }
    }
}

/// Runs the rows in all columns. A failure names row, column and step.
pub(crate) fn run(rows: impl Fn(Terms) -> Vec<Case> + Sync) {
    run_with(|_, terms| rows(terms));
}

/// A variant of [`run`] for rows that need the indices of the devices or the time.
pub(crate) fn run_with(rows: impl Fn(&mut Harness, Terms) -> Vec<Case> + Sync) {
    harness::with(|harness| run_on(harness, &rows));
}

/// A variant of [`run_with`] on a node that is already set up.
pub(crate) fn run_on(harness: &mut Harness, rows: &impl Fn(&mut Harness, Terms) -> Vec<Case>) {
    let mut run = 0;
    for terms in Terms::all() {
        for case in rows(harness, terms) {
            harness.set_up(&case.setup);
            for (number, step) in case.steps.iter().enumerate() {
                let result = catch_unwind(AssertUnwindSafe(|| step.run(harness, terms)));
                if let Err(panic) = result {
                    eprintln!("in “{}”, packet {}, {terms:?}", case.what, number + 1);
                    resume_unwind(panic);
                }
                run += 1;
            }
        }
    }
    assert!(run > 0, "no row for any column");
}
