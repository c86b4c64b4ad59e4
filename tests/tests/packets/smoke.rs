use traffic_policy_tests::harness::{self, Frontend, Hook, Setup, Spot};
use traffic_policy_tests::lab::Family;
use traffic_policy_tests::packet::{Packet, flag};

#[test]
fn smoke() {
    harness::with(|harness| {
        for family in Family::BOTH {
            for hook in Hook::INGRESS {
                let t = std::time::Instant::now();
                harness.set_up(&Setup::of(Frontend::new(Spot::Node, 80).endpoints(&[(Spot::Near, 8080)])));
                eprintln!("{:?}", t.elapsed());
                let p = Packet::tcp((Spot::Client.of(family), 1234), (Spot::Node.of(family), 80), flag::SYN);
                let ran = harness.run(hook, &p);
                eprintln!(
                    "{hook:?} {} {:?}\n{}",
                    ran.outcome,
                    ran.way,
                    traffic_policy_tests::packet::render(&ran.frame)
                );
                eprintln!("{:#?}", harness.flows(family));
            }
        }
    });
}
