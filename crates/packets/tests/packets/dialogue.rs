//! A client and an endpoint that talk through the programs, for tests of the state in the flow
//! table.

use std::net::IpAddr;

use traffic_policy_ebpf::tcp::ASSURED;
use traffic_policy_testing::harness::{Device, FlowEntry, HZ, Harness, Hook, Ran, Spot};
use traffic_policy_testing::packet::{Packet, flag};

use crate::table::{CLIENT_PORT, Terms};

/// The sequence numbers of the client's SYN, and of the endpoint's SYN-ACK.
pub(crate) const SYN_NUMBER: u32 = 1000;
pub(crate) const ANSWER_NUMBER: u32 = 5000;

/// One client's packets to a frontend, and the answers. The endpoint is the one that the flow table
/// names.
#[derive(Clone, Copy)]
pub(crate) struct Dialogue {
    pub(crate) terms: Terms,
    pub(crate) client: (Spot, u16),
    pub(crate) frontend: (Spot, u16),
}

impl Dialogue {
    pub(crate) fn new(terms: Terms, frontend: (Spot, u16)) -> Self {
        Self { terms, client: (Spot::Client, CLIENT_PORT), frontend }
    }

    pub(crate) fn with_port(self, port: u16) -> Self {
        Self { client: (self.client.0, port), ..self }
    }

    pub(crate) fn opening(self) -> Packet {
        self.terms.request(self.frontend).source(self.terms.at(self.client))
    }

    /// A segment of the client after its SYN, which acknowledges the SYN-ACK; a datagram for UDP.
    pub(crate) fn request(self, flags: u8) -> Packet {
        if !self.terms.tcp {
            return self.opening();
        }
        self.opening()
            .with(|packet| packet.tcp_mut().flags = flags)
            .numbers(SYN_NUMBER + 1, if flags & flag::ACK == 0 { 0 } else { ANSWER_NUMBER + 1 })
    }

    /// Sends the SYN or first datagram.
    #[track_caller]
    pub(crate) fn open(self, harness: &Harness) -> Ran {
        harness.run(self.terms.hook, &self.opening())
    }

    #[track_caller]
    pub(crate) fn send(self, harness: &Harness, flags: u8) -> Ran {
        harness.run(self.terms.hook, &self.request(flags))
    }

    /// The request entry and the reply entry of this dialogue.
    #[track_caller]
    pub(crate) fn entries(self, harness: &Harness) -> (FlowEntry, FlowEntry) {
        let request = self.request_entry(harness).expect("no request entry");
        let flows = harness.flows(self.terms.family);
        let mut replies = flows.iter().filter(|entry| {
            (entry.from, entry.to) == (request.new_to, request.new_from) && !entry.is_request()
        });
        (request, *replies.next().expect("no reply entry"))
    }

    pub(crate) fn request_entry(self, harness: &Harness) -> Option<FlowEntry> {
        let (address, port) = self.terms.at(self.frontend);
        let (client, client_port) = self.terms.at(self.client);
        let (from, to) = ((client, client_port).into(), (address, port).into());
        let flows = harness.flows(self.terms.family);
        flows.into_iter().find(|entry| entry.is_request() && entry.from == from && entry.to == to)
    }

    /// A packet of the endpoint, as it arrives on eth0 or leaves this node.
    #[track_caller]
    pub(crate) fn answer_packet(self, harness: &Harness, flags: u8) -> Packet {
        let (request, _) = self.entries(harness);
        let end = |socket: std::net::SocketAddr| -> (IpAddr, u16) { (socket.ip(), socket.port()) };
        let (from, to) = (end(request.new_to), end(request.new_from));
        let packet = if self.terms.tcp {
            let number = if flags & flag::SYN == 0 { ANSWER_NUMBER + 1 } else { ANSWER_NUMBER };
            Packet::tcp(from, to, flags).numbers(number, SYN_NUMBER + 1)
        } else {
            Packet::udp(from, to)
        };
        packet.macs(Spot::RouterNear.mac(), Device::Eth0.mac())
    }

    #[track_caller]
    pub(crate) fn answer(self, harness: &Harness, flags: u8) -> Ran {
        self.answered(harness, &self.answer_packet(harness, flags))
    }

    /// Sends a packet of the endpoint.
    #[track_caller]
    pub(crate) fn answered(self, harness: &Harness, packet: &Packet) -> Ran {
        let local = matches!(self.entries(harness).0.kind, traffic_policy_ebpf::abi::kind::DELIVER);
        harness.run(if local { Hook::Egress } else { self.terms.hook }, packet)
    }

    /// Closes a TCP connection: both sides send a FIN and acknowledge that of the other.
    #[track_caller]
    pub(crate) fn close(self, harness: &Harness) {
        const FIN_ACK: u8 = flag::FIN | flag::ACK;
        self.send(harness, FIN_ACK);
        let fin = self.answer_packet(harness, FIN_ACK).numbers(ANSWER_NUMBER + 1, SYN_NUMBER + 2);
        self.answered(harness, &fin);
        let last = self.request(flag::ACK).numbers(SYN_NUMBER + 2, ANSWER_NUMBER + 2);
        harness.run(self.terms.hook, &last);
    }

    /// Makes the flow appear idle for `seconds`.
    #[track_caller]
    pub(crate) fn idle(self, harness: &mut Harness, seconds: u32) {
        let jiffies = seconds * HZ;
        let (request, reply) = self.entries(harness);
        for entry in [request, reply] {
            harness.change(&entry, |entry| entry.go_back(jiffies));
        }
    }

    /// Opens the flow and assures it: SYN, SYN-ACK, ACK; or three datagrams, the last one after two
    /// seconds.
    #[track_caller]
    pub(crate) fn establish(self, harness: &Harness) {
        for outcome in [self.open(harness).outcome, self.answer(harness, flag::SYN | flag::ACK).outcome] {
            assert!(matches!(outcome, "forwarded" | "replied" | "delivered" | "replied-local"), "{outcome}");
        }
        self.let_stream(harness);
        let outcome = self.send(harness, flag::ACK).outcome;
        assert!(matches!(outcome, "forwarded" | "delivered"), "{outcome}");
    }

    /// Makes an unassured UDP flow appear to have begun more than two seconds ago.
    pub(crate) fn let_stream(self, harness: &Harness) {
        let (request, _) = self.entries(harness);
        if !self.terms.tcp && request.state & ASSURED == 0 {
            harness.begin_earlier(&request, 2 * HZ + 10);
        }
    }
}

/// Runs `work` in all columns, on fresh maps for each.
pub(crate) fn everywhere(work: impl Fn(&mut Harness, Terms) + Sync) {
    in_columns(|_| true, work);
}

/// Runs `work` in the columns of TCP.
pub(crate) fn everywhere_tcp(work: impl Fn(&mut Harness, Terms) + Sync) {
    in_columns(|terms| terms.tcp, work);
}

/// Runs `work` in the columns of UDP.
pub(crate) fn everywhere_udp(work: impl Fn(&mut Harness, Terms) + Sync) {
    in_columns(|terms| !terms.tcp, work);
}

/// Runs `work` in the columns of XDP.
pub(crate) fn everywhere_xdp(work: impl Fn(&mut Harness, Terms) + Sync) {
    in_columns(Terms::xdp, work);
}

fn in_columns(is_one: fn(Terms) -> bool, work: impl Fn(&mut Harness, Terms) + Sync) {
    traffic_policy_testing::harness::with(|harness| {
        for terms in Terms::all().filter(|terms| is_one(*terms)) {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(harness, terms)));
            if let Err(panic) = result {
                eprintln!("in {terms:?}");
                std::panic::resume_unwind(panic);
            }
        }
    });
}
