//! Nodes of endpoints that have stopped answering: when the agent is told, and the SYNs that are
//! sent elsewhere.

use traffic_policy_ebpf::abi::NodeSilence;
use traffic_policy_testing::harness::{Frontend, Harness, Setup, Spot};
use traffic_policy_testing::packet::flag;

use crate::dialogue::{Dialogue, SYN_NUMBER, everywhere, everywhere_tcp};
use crate::errors;
use crate::table::{ENDPOINT_PORT, PORT, Terms};

const VIP: (Spot, u16) = (Spot::Vip, PORT);
const SYN_ACK: u8 = flag::SYN | flag::ACK;
/// SYNs that have to remain unanswered.
const SYNS: u32 = 3;
/// Jiffies for which they have to: longer than a test takes.
const AFTER: u32 = 1_000_000;

fn set_up(harness: &mut Harness, endpoints: &[Spot]) {
    let endpoints: Vec<_> = endpoints.iter().map(|spot| (*spot, ENDPOINT_PORT)).collect();
    harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&endpoints)).snat_ports(5000..6000));
    watch(harness);
}

/// Has silent nodes suspected, and forgets what was sent to any.
fn watch(harness: &mut Harness) {
    harness.change_config(|config| (config.suspect_syns, config.suspect_after) = (SYNS, AFTER));
    for spot in [Spot::Near, Spot::Far] {
        harness.change_node_silence(spot, |node| *node = NodeSilence::default());
    }
}

fn of_port(terms: Terms, port: u16) -> Dialogue {
    Dialogue::new(terms, VIP).with_port(port)
}

/// Makes the first unanswered SYN to a node appear as old as it has to be.
fn let_wait(harness: &mut Harness, spot: Spot) {
    harness.change_node_silence(spot, |node| node.asked = node.asked.wrapping_sub(AFTER));
}

/// A node to whose endpoint enough SYNs were sent, the first of them long enough ago.
fn silence(harness: &mut Harness, terms: Terms, spot: Spot) {
    for port in 1..=SYNS as u16 {
        of_port(terms, port).open(harness);
    }
    let_wait(harness, spot);
}

/// Returns the number of suspicions that `work` raises.
fn suspicions(harness: &mut Harness, work: impl FnOnce(&mut Harness)) -> usize {
    let before = harness.unread_suspicions();
    work(harness);
    harness.unread_suspicions() - before
}

/// The address that a dialogue's endpoint has.
fn endpoint(harness: &Harness, dialogue: Dialogue) -> std::net::IpAddr {
    dialogue.entries(harness).0.new_to.ip()
}

#[test]
fn the_agent_is_told_once_of_syns_without_an_answer() {
    everywhere(|harness, terms| {
        set_up(harness, &[Spot::Near]);
        let early = suspicions(harness, |harness| silence(harness, terms, Spot::Near));
        assert_eq!(early, 0, "nobody has noticed yet, {terms:?}");
        let told = suspicions(harness, |harness| {
            (10..20).for_each(|port| _ = of_port(terms, port).open(harness));
        });
        assert_eq!(told, usize::from(terms.tcp), "{terms:?}");
        // An answer ends it.
        if terms.tcp {
            of_port(terms, 10).answer(harness, SYN_ACK);
            assert_eq!(harness.node_silence(Spot::Near).syns, 0);
        }
    });
}

/// Neither few SYNs, nor a short time, nor an answer of any endpoint of the node meanwhile; and
/// none if it is switched off.
#[test]
fn a_node_that_may_be_slow_is_not_suspected() {
    everywhere_tcp(|harness, terms| {
        let mut case = |name: &str, work: &dyn Fn(&mut Harness)| {
            set_up(harness, &[Spot::Near]);
            assert_eq!(suspicions(harness, work), 0, "{name}, {terms:?}");
        };
        case("two SYNs", &|harness| {
            of_port(terms, 1).open(harness);
            let_wait(harness, Spot::Near);
            of_port(terms, 2).open(harness);
        });
        case("no time", &|harness| (1..20).for_each(|port| _ = of_port(terms, port).open(harness)));
        for flags in [SYN_ACK, flag::RST | flag::ACK] {
            case("an answer", &|harness| {
                silence(harness, terms, Spot::Near);
                of_port(terms, 2).answer(harness, flags);
                (10..13).for_each(|port| _ = of_port(terms, port).open(harness));
            });
        }
        case("off", &|harness| {
            harness.change_config(|config| config.suspect_syns = 0);
            silence(harness, terms, Spot::Near);
            of_port(terms, 10).open(harness);
        });
    });
}

#[test]
fn a_retransmission_goes_to_a_node_that_answers() {
    everywhere_tcp(|harness, terms| {
        set_up(harness, &[Spot::Near]);
        silence(harness, terms, Spot::Near);
        let dialogue = of_port(terms, 1);
        let (silent, port) = (endpoint(harness, dialogue), dialogue.entries(harness).0.new_from);
        // Meanwhile there is another endpoint.
        harness.put(
            1,
            &Frontend::new(VIP.0, VIP.1)
                .endpoints(&[(Spot::Near, ENDPOINT_PORT), (Spot::Far, ENDPOINT_PORT)]),
        );
        let ran = dialogue.open(harness);
        assert_eq!(ran.outcome, "forwarded", "{terms:?}");
        assert_ne!(endpoint(harness, dialogue), silent, "{terms:?}");
        // What the silent endpoint sends after all is no answer.
        let late = harness.flows(terms.family).into_iter().filter(|entry| entry.to == port).count();
        assert!(late <= 1, "the former reply entry is left, {terms:?}");
        // The connection is established with the other one.
        dialogue.establish(harness);
    });
}

/// A SYN with another number, which can be forged, moves no connection; nor does a retransmission
/// while the node answers others, nor one after an answer.
#[test]
fn other_syns_stay_where_they_are() {
    everywhere_tcp(|harness, terms| {
        let both = [(Spot::Near, ENDPOINT_PORT), (Spot::Far, ENDPOINT_PORT)];
        for (name, silent, answered, number) in [
            ("another SYN", true, false, SYN_NUMBER + 77),
            ("a node that answers", false, false, SYN_NUMBER),
            ("a connection that was answered", true, true, SYN_NUMBER),
        ] {
            set_up(harness, &[Spot::Near]);
            let dialogue = of_port(terms, 40);
            dialogue.open(harness);
            if answered {
                dialogue.answer(harness, SYN_ACK);
                // The answer has ended the silence before it began.
                harness.change_node_silence(Spot::Near, |node| node.answered = node.answered.wrapping_sub(1));
            }
            silence(harness, terms, Spot::Near);
            if !silent {
                harness.change_node_silence(Spot::Near, |node| node.syns = 0);
            }
            let before = endpoint(harness, dialogue);
            harness.put(1, &Frontend::new(VIP.0, VIP.1).endpoints(&both[1..]));
            harness.run(terms.hook, &dialogue.opening().numbers(number, 0));
            assert_eq!(endpoint(harness, dialogue), before, "{name}, {terms:?}");
        }
    });
}

/// The agent has found the node dead: one SYN is enough.
#[test]
fn a_retransmission_leaves_a_dead_node_at_once() {
    everywhere_tcp(|harness, terms| {
        set_up(harness, &[Spot::Near]);
        let dialogue = of_port(terms, 1);
        dialogue.open(harness);
        let before = endpoint(harness, dialogue);
        harness.change_node_silence(Spot::Near, |node| node.dead = 1);
        // The agent has left its endpoints out.
        harness.put(1, &Frontend::new(VIP.0, VIP.1).endpoints(&[(Spot::Far, ENDPOINT_PORT)]));
        dialogue.open(harness);
        assert_ne!(endpoint(harness, dialogue), before, "{terms:?}");
    });
}

/// A router says that it does not reach the endpoint: the agent is told at once, but only of a
/// node that has not answered yet, and once.
#[test]
fn a_host_that_is_unreachable_is_suspected_at_once() {
    everywhere_tcp(|harness, terms| {
        let host = if terms.v4() { (3, 1, [0; 4]) } else { (1, 3, [0; 4]) };
        let about = errors::request(terms, errors::NODE);
        for (kind, expected) in [(host, 1), (errors::port_unreachable(terms), 0)] {
            harness.set_up(&errors::setup(errors::NODE, errors::NEAR));
            watch(harness);
            Dialogue::new(terms, errors::NODE).open(harness);
            let error = errors::error(terms, kind, Spot::RouterNear, &about.seen, errors::WHOLE);
            let told = suspicions(harness, |harness| {
                for _ in 0..3 {
                    let outcome = harness.run(terms.hook, &error).outcome;
                    assert_eq!(outcome, "replied-icmp-error", "{terms:?}");
                }
            });
            assert_eq!(told, expected, "{kind:?}, {terms:?}");
            // The node has answered: the error may be forged.
            harness.change_node_silence(Spot::Near, |node| (node.syns, node.reported) = (0, 0));
            assert_eq!(suspicions(harness, |harness| _ = harness.run(terms.hook, &error)), 0, "{terms:?}");
        }
    });
}
