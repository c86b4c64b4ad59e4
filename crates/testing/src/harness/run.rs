//! A single packet run through one program.

use aya::Ebpf;
use aya::programs::{
    Program, RawTracePoint, RawTracePointRunOptions, SchedClassifier, TestRun, TestRunOptions, Xdp,
};
use traffic_policy_dataplane::{sk_buff, xdp_md};
use traffic_policy_ebpf::abi::hook;
use traffic_policy_ebpf::outcome::{Outcome, Verdict};

use super::{Device, Harness};
use crate::packet::{Packet, difference, render};

/// A program that sees packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    Xdp,
    Ingress,
    Egress,
    /// TC ingress of a device without Ethernet.
    IngressL3,
    EgressL3,
    /// TC ingress of the host side of a pod's device, with direct delivery.
    FromPod,
    /// The same with Services for pods, and TC egress there.
    FromClientPod,
    ToClientPod,
}

impl Hook {
    /// The hooks that see incoming packets: one table of cases serves both.
    pub const INGRESS: [Self; 2] = [Self::Xdp, Self::Ingress];

    fn program(self) -> &'static str {
        match self {
            Self::Xdp => "tp_xdp_ingress",
            Self::Ingress => "tp_tc_ingress",
            Self::Egress => "tp_tc_egress",
            Self::IngressL3 => "tp_l3_ingress",
            Self::EgressL3 => "tp_l3_egress",
            Self::FromPod => "tp_tc_pod",
            Self::FromClientPod => "tp_pod_ingress",
            Self::ToClientPod => "tp_pod_egress",
        }
    }

    fn number(self) -> u32 {
        match self {
            Self::Xdp => hook::XDP,
            Self::Ingress | Self::IngressL3 | Self::FromPod | Self::FromClientPod => hook::INGRESS,
            Self::Egress | Self::EgressL3 | Self::ToClientPod => hook::EGRESS,
        }
    }

    /// The meaning of a program's return value.
    pub(super) fn action(self, verdict: u32) -> Action {
        // XDP_DROP to XDP_REDIRECT; TC_ACT_UNSPEC, TC_ACT_SHOT, TC_ACT_REDIRECT: linux/bpf.h and
        // linux/pkt_cls.h.
        match (self, verdict as i32) {
            (Self::Xdp, 2) => Action::Pass,
            (Self::Xdp, 1) => Action::Drop,
            (Self::Xdp, 3) => Action::Back,
            (Self::Xdp, 4) => Action::Redirect,
            (hook, -1) if hook != Self::Xdp => Action::Pass,
            (hook, 2) if hook != Self::Xdp => Action::Drop,
            (hook, 7) if hook != Self::Xdp => Action::Redirect,
            (hook, other) => panic!("{hook:?} answered {other}, which is no verdict of ours"),
        }
    }
}

/// The action that the kernel takes on the packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Pass,
    Drop,
    /// XDP: sent by the device on which it arrived.
    Back,
    Redirect,
}

/// A frame at a hook.
#[derive(Clone, Debug)]
pub struct Input {
    pub hook: Hook,
    pub device: Device,
    pub frame: Vec<u8>,
    /// Payload bytes of each segment of an aggregate; TC only.
    pub segment: u32,
    /// The mark of the packet; TC only.
    pub mark: u32,
}

impl Input {
    pub fn new(hook: Hook, frame: Vec<u8>) -> Self {
        Self { hook, device: Device::Eth0, frame, segment: 0, mark: 0 }
    }
}

/// The result of running the programs on a packet.
#[derive(Clone, Debug)]
pub struct Ran {
    /// The name of the outcome; empty for a packet that a hook of pods' devices leaves to the
    /// stack: it is not counted there.
    pub outcome: &'static str,
    pub action: Action,
    pub frame: Vec<u8>,
}

impl Ran {
    /// Compares the whole frame.
    #[track_caller]
    pub fn expect_frame(&self, expected: &Packet) -> &Self {
        if let Some(difference) = difference(&expected.bytes(), &self.frame) {
            panic!("{}: {difference}", self.outcome);
        }
        self
    }

    #[track_caller]
    pub fn expect(&self, outcome: &str) -> &Self {
        assert_eq!(self.outcome, outcome, "{:?}\n{}", self.action, render(&self.frame));
        self
    }
}

/// Outcomes, each with a number of packets.
pub type Outcomes = Vec<(Outcome, u64)>;

impl Harness {
    /// Runs a packet that arrives on eth0 (or, at egress, leaves by it).
    #[track_caller]
    pub fn run(&self, hook: Hook, packet: &Packet) -> Ran {
        self.input(&Input::new(hook, packet.bytes()))
    }

    /// Runs a frame, and checks the invariants of every packet: one counter is increased by one and
    /// its name agrees with the verdict; a packet that is only passed is unchanged.
    #[track_caller]
    pub fn input(&self, input: &Input) -> Ran {
        let before = self.outcomes(input.hook);
        let (verdict, frame) = execute(&self.object, self.ifindex(input.device), input);
        let moved = self.outcomes_since(input.hook, &before);
        let of_pods = matches!(input.hook, Hook::FromPod | Hook::FromClientPod | Hook::ToClientPod);
        if of_pods && moved.is_empty() {
            assert_eq!(input.hook.action(verdict), Action::Pass);
            assert_eq!(input.frame, frame, "an uncounted packet was changed");
            return Ran { outcome: "", action: Action::Pass, frame };
        }
        let [(outcome, 1)] = moved.as_slice() else {
            panic!("not one outcome: {moved:?}\n{}", render(&input.frame));
        };
        let action = input.hook.action(verdict);
        let fits = match outcome.verdict() {
            Verdict::Pass => action == Action::Pass,
            Verdict::Drop => action == Action::Drop,
            Verdict::Send => matches!(action, Action::Back | Action::Redirect),
        };
        assert!(fits, "{} with verdict {action:?}", outcome.name());
        // A packet that may have concerned a Service was given an Ethernet header.
        let pushed = input.hook == Hook::IngressL3 && frame.len() > input.frame.len();
        if outcome.name().starts_with("passed")
            && let Some(difference) = difference(&input.frame, if pushed { &frame[14..] } else { &frame })
        {
            panic!("{}, but {difference}", outcome.name());
        }
        Ran { outcome: outcome.name(), action, frame }
    }

    /// The number of packets of each outcome that a hook has had.
    pub fn outcomes(&self, hook: Hook) -> Outcomes {
        let values = self.tables.counters.get(&hook.number(), 0);
        let values = values.unwrap_or_else(|error| panic!("reading the counters: {error}"));
        let sum = |outcome: Outcome| values.iter().map(|cpu| cpu[outcome as usize]).sum();
        Outcome::ALL.iter().map(|outcome| (*outcome, sum(*outcome))).collect()
    }

    /// The outcomes of a hook's packets since [`Self::outcomes`] returned `before`.
    pub fn outcomes_since(&self, hook: Hook, before: &Outcomes) -> Outcomes {
        let after = self.outcomes(hook);
        let moved = before.iter().zip(after).map(|((_, before), (outcome, after))| (outcome, after - before));
        moved.filter(|(_, packets)| *packets > 0).collect()
    }

    /// The current time in jiffies, as flows note it.
    pub fn now(&self) -> u32 {
        let program: Result<&RawTracePoint, _> = named(&self.object, "tp_clock").try_into();
        let ran = program.and_then(|program| program.test_run(RawTracePointRunOptions::default()));
        ran.unwrap_or_else(|error| panic!("running clock: {error}")).return_value
    }
}

/// Runs a frame that arrives on the device with this index.
pub(super) fn execute(object: &Ebpf, index: u32, input: &Input) -> (u32, Vec<u8>) {
    let mut frame = vec![0; input.frame.len() + 256];
    let xdp = xdp_md(input.frame.len() as u32, index);
    let mut skb = sk_buff(index, input.segment);
    // Fields of `struct __sk_buff`.
    skb[8..12].copy_from_slice(&input.mark.to_ne_bytes());
    let program = named(object, input.hook.program());
    let options = TestRunOptions {
        data_in: Some(&input.frame),
        data_out: Some(&mut frame),
        ctx_in: Some(if input.hook == Hook::Xdp { &xdp } else { &skb }),
        ..TestRunOptions::default()
    };
    let ran = if input.hook == Hook::Xdp {
        let program: Result<&Xdp, _> = program.try_into();
        program.and_then(|program| program.test_run(options))
    } else {
        let program: Result<&SchedClassifier, _> = program.try_into();
        program.and_then(|program| program.test_run(options))
    };
    let ran = ran.unwrap_or_else(|error| panic!("running {}: {error:?}", input.hook.program()));
    frame.truncate(ran.data_size_out as usize);
    (ran.return_value, frame)
}

fn named<'a>(object: &'a Ebpf, name: &str) -> &'a Program {
    object.program(name).unwrap_or_else(|| panic!("no program {name}"))
}
