//! Packets that are refused: they are answered or dropped.

use std::net::SocketAddr;

use anyhow::Result;
use traffic_policy_bench::{
    BenchNode, Content, Expected, Frame, Hook, Loaded, Restored, Setup,
    fixture::{MAC, ROUTER_MAC, V4, V6, later},
    frame::{frame, unpacked},
    loaded::{NO_ENDPOINT_PORT, NO_LOCAL_PORT, NODE_PORT, VIP},
};
use traffic_policy_ebpf::outcome::{Outcome, Verdict};
use traffic_policy_testing::packet::{Packet, Transport, flag};

use super::{Packets, alone, family};
use crate::{
    Effort,
    report::{Report, Row, Unit},
};

const GROUP: &str = "refused";
const SENDERS: u32 = 1_000;
/// More answers than any run needs.
pub(super) const ANSWERS_PER_JIFFY: u32 = 1 << 20;

/// Reason for the refusal.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    WithoutEndpoint,
    WithoutFlow,
    LocalElsewhere,
}

/// A packet at a hook.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    pub(super) what: What,
    pub(super) ipv6: bool,
    pub(super) content: Content,
    pub(super) hook: Hook,
}

impl Wanted {
    pub(super) fn name(self) -> String {
        let family = family(self.ipv6);
        let packet = match self.content {
            Content::Syn => "SYN",
            Content::Datagram => "UDP",
            _ => "ACK",
        };
        let what = match self.what {
            What::WithoutEndpoint => "no endpoint, port unreachable",
            What::WithoutFlow => "no flow at a load balancer's address, RST",
            What::LocalElsewhere => "policy Local and no endpoint here, drop",
        };
        format!("{what}, {family} {packet}, {}", self.hook.name())
    }

    pub(super) fn outcome(self) -> Outcome {
        match self.what {
            What::WithoutEndpoint => Outcome::RejectedNoEndpoint,
            What::WithoutFlow => Outcome::ResetNoFlow,
            What::LocalElsewhere => Outcome::DroppedNoLocalEndpoint,
        }
    }

    fn ends(self, number: u32) -> [SocketAddr; 2] {
        let own = if self.ipv6 { V6 } else { V4 };
        let (address, port) = match self.what {
            What::WithoutEndpoint => (own.node, NO_ENDPOINT_PORT),
            What::WithoutFlow => (later(own.node, VIP), NODE_PORT),
            What::LocalElsewhere => (own.node, NO_LOCAL_PORT),
        };
        [SocketAddr::new(later(own.client, number), 40_000), SocketAddr::new(address, port)]
    }

    pub(super) fn frames(self) -> Result<Vec<Frame>> {
        let one = |number| {
            let [from, to] = self.ends(number);
            frame(from, to, self.content)
        };
        (0..SENDERS).map(one).collect()
    }

    /// Returns the expected result for the first packet.
    fn expected(self, first: &Frame) -> Expected {
        let [client, frontend] = self.ends(0).map(|end| (end.ip(), end.port()));
        let answer = match self.what {
            What::LocalElsewhere => return Expected::unchanged(Verdict::Drop, first),
            // RFC 9293 section 3.10.7.1: the sequence number of the RST is the one that the segment
            // acknowledges.
            What::WithoutFlow => {
                let number = acknowledged(first, self.ipv6);
                Packet::tcp(frontend, client, flag::RST)
                    .numbers(number, 0)
                    .with(|packet| packet.tcp_mut().window = 0)
            }
            // RFC 792, RFC 4443 section 3.1: the packet's IP header and at least eight bytes after
            // it.
            What::WithoutEndpoint => {
                let (kind, code, quoted) = if self.ipv6 { (1, 4, 40 + 8) } else { (3, 3, 20 + 8) };
                Packet::new(frontend.0, client.0, Transport::Icmp { kind, code, rest: [0; 4] })
                    .payload(&unpacked(first)[14..14 + quoted])
            }
        };
        Expected { verdict: Verdict::Send, frame: answer.macs(MAC, ROUTER_MAC).bytes() }
    }
}

/// Returns the acknowledgement number of a segment.
pub(super) fn acknowledged(frame: &Frame, ipv6: bool) -> u32 {
    let tcp = 14 + if ipv6 { 40 } else { 20 };
    let mut number = [0; 4];
    number.copy_from_slice(&unpacked(frame)[tcp + 8..tcp + 12]);
    u32::from_be_bytes(number)
}

pub(super) fn wanted(effort: Effort, report: &mut Report) -> Vec<Wanted> {
    let contents = [
        (What::WithoutEndpoint, Content::Syn),
        (What::WithoutEndpoint, Content::Datagram),
        (What::WithoutFlow, Content::Ack),
        (What::LocalElsewhere, Content::Syn),
        (What::LocalElsewhere, Content::Datagram),
    ];
    let mut wanted = Vec::new();
    for (what, content) in contents {
        for ipv6 in [false, true] {
            for hook in [Hook::Xdp, Hook::Ingress] {
                let row = Wanted { what, ipv6, content, hook };
                let quick = content != Content::Datagram && (!ipv6 || hook == Hook::Xdp);
                if (effort.full || quick) && report.wants(GROUP, &row.name()) {
                    wanted.push(row);
                }
            }
        }
    }
    wanted
}

pub(super) fn measure(
    wanted: &[Wanted],
    fixture: &BenchNode,
    effort: Effort,
    report: &mut Report,
) -> Result<()> {
    if wanted.is_empty() {
        return Ok(());
    }
    report.measure(|| {
        let all = alone(
            wanted,
            effort,
            || load(fixture),
            |row| {
                let frames = row.frames()?;
                let expected = row.expected(&frames[0]);
                Ok(Packets { frames, hook: row.hook, outcome: row.outcome(), expected })
            },
        )?;
        let row =
            |(row, [ours]): (&Wanted, [Vec<f64>; 1])| Row::new(GROUP, &row.name(), Unit::Nanoseconds, &ours);
        Ok(wanted.iter().zip(all).map(row).collect())
    })
}

fn load(fixture: &BenchNode) -> Result<Loaded> {
    let mut loaded = Loaded::new(fixture, Setup::default())?;
    prepare(&mut loaded);
    Ok(loaded)
}

/// Allows the packet path to answer all packets of a run, which change their length.
pub(super) fn prepare(loaded: &mut Loaded) {
    loaded.set_answers_per_jiffy(ANSWERS_PER_JIFFY);
    loaded.feeder.restore(Restored::Tail);
}
