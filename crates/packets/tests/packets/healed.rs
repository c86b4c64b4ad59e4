//! Repair of the assured bit. Both entries of a flow carry it; if two CPUs write the state at the
//! same time, one may undo it in one entry. Such a flow must not take the slow path for ever.

use traffic_policy_dataplane::Sweeper;
use traffic_policy_ebpf::tcp::{ASSURED, Timeouts};
use traffic_policy_testing::harness::{FlowEntry, Frontend, Harness, Setup, Spot};
use traffic_policy_testing::packet::flag;

use crate::dialogue::{Dialogue, everywhere, everywhere_tcp, everywhere_udp};
use crate::table::{ENDPOINT_PORT, PORT, Terms};

const VIP: (Spot, u16) = (Spot::Vip, PORT);
const ACK: u8 = flag::ACK;

/// Time-outs in jiffies, far longer than a test takes.
const TIMEOUTS: Timeouts = Timeouts {
    established: 80_000_000,
    half_closed: 1_000_000,
    finished: 1_000_000,
    reset: 1_000_000,
    unassured: 1_000_000,
    udp: 1_000_000,
    udp_answered: 1_000_000,
};

/// The entry that has lost the bit.
#[derive(Clone, Copy, Debug)]
enum Lost {
    Request,
    Reply,
}

/// Makes an established flow of which one entry has lost its bit.
fn damaged(harness: &mut Harness, terms: Terms, endpoint: Spot, lost: Lost) -> Dialogue {
    harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[(endpoint, ENDPOINT_PORT)])));
    let dialogue = Dialogue::new(terms, VIP);
    dialogue.establish(harness);
    let (request, reply) = dialogue.entries(harness);
    let entry = match lost {
        Lost::Request => request,
        Lost::Reply => reply,
    };
    harness.change(&entry, |entry| entry.state &= !ASSURED);
    assert_ne!(assured(dialogue.entries(harness)), [true; 2]);
    dialogue
}

fn assured((request, reply): (FlowEntry, FlowEntry)) -> [bool; 2] {
    [request, reply].map(|entry| entry.state & ASSURED != 0)
}

/// The outcomes of a packet in each direction while only the entry program is loaded.
fn without_the_slow_path(harness: &mut Harness, dialogue: Dialogue) -> [&'static str; 2] {
    harness
        .without_jumps(|harness| [dialogue.send(harness, ACK).outcome, dialogue.answer(harness, ACK).outcome])
}

#[test]
fn by_a_sweep() {
    everywhere(|harness, terms| {
        for (endpoint, fast) in
            [(Spot::Near, ["forwarded", "replied"]), (Spot::Local, ["delivered", "replied-local"])]
        {
            for lost in [Lost::Request, Lost::Reply] {
                let dialogue = damaged(harness, terms, endpoint, lost);
                if endpoint == Spot::Near {
                    // The control: it shows that a packet takes the slow path.
                    let slow = "passed-missed-tail-call";
                    assert!(without_the_slow_path(harness, dialogue).contains(&slow), "{lost:?}");
                }
                harness.sweep(&mut Sweeper::new(TIMEOUTS, [256; 2]), false);
                assert_eq!(assured(dialogue.entries(harness)), [true; 2], "{endpoint:?} {lost:?}");
                // The first packet of each direction resolves its next hop.
                dialogue.send(harness, ACK);
                dialogue.answer(harness, ACK);
                assert_eq!(without_the_slow_path(harness, dialogue), fast, "{endpoint:?} {lost:?}");
            }
        }
    });
}

/// The endpoint's next segment repairs it, without an agent that sweeps.
#[test]
fn by_a_reply() {
    everywhere_tcp(|harness, terms| {
        for endpoint in [Spot::Near, Spot::Local] {
            let dialogue = damaged(harness, terms, endpoint, Lost::Reply);
            dialogue.answer(harness, ACK);
            assert_eq!(assured(dialogue.entries(harness)), [true; 2], "{endpoint:?}");
        }
    });
}

/// The client's next datagram repairs it, without an agent that sweeps.
#[test]
fn by_a_datagram() {
    everywhere_udp(|harness, terms| {
        for (endpoint, fast) in [(Spot::Near, "forwarded"), (Spot::Local, "delivered")] {
            let dialogue = damaged(harness, terms, endpoint, Lost::Request);
            let request =
                |harness: &mut Harness| harness.without_jumps(|harness| dialogue.send(harness, ACK).outcome);
            // The control: until then each datagram takes the slow path; neither answers nor a
            // sweep that has not run repair it.
            assert_eq!(request(harness), "passed-missed-tail-call", "{endpoint:?}");
            dialogue.answer(harness, ACK);
            assert_eq!(assured(dialogue.entries(harness)), [false, true], "{endpoint:?}");
            dialogue.send(harness, ACK);
            assert_eq!(assured(dialogue.entries(harness)), [true; 2], "{endpoint:?}");
            assert_eq!(request(harness), fast, "{endpoint:?}");
        }
    });
}
