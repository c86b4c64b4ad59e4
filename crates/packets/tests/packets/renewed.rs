//! Tests share loaded programs: none sees the state that another has left.

use traffic_policy_ebpf::abi::HOPS;
use traffic_policy_testing::harness::{self, Frontend, Setup, Spot};

use crate::dialogue::Dialogue;
use crate::table::{ENDPOINT_PORT, PORT, Terms};

#[test]
fn nothing_of_an_earlier_test_is_left() {
    harness::with(|harness| {
        let new = harness.content().unwrap();
        for (name, entries) in &new {
            let programs = match name.as_str() {
                "tp_xdp_calls" => 12,
                "tp_tc_calls" => 24,
                "tp_l3_calls" => 9,
                "tp_pod_calls" => 17,
                _ => 0,
            };
            assert_eq!(entries.len(), programs, "{name}");
        }

        // Everything that the packet path writes itself, up to the last next hop, and an event;
        // then an entry in every map.
        for terms in Terms::all() {
            let frontend = Frontend::new(Spot::Vip, PORT).endpoints(&[(Spot::Near, ENDPOINT_PORT)]);
            harness.set_up(&Setup::of(frontend));
            harness.change_config(|config| config.monitor_until = u64::MAX);
            Dialogue::new(terms, (Spot::Vip, PORT)).establish(harness);
        }
        let mut hop = harness.tables.hops.get(&1, 0).unwrap();
        hop.epoch = 7;
        harness.tables.hops.set(HOPS - 1, hop, 0).unwrap();
        harness.scribble().unwrap();
        for (name, entries) in harness.content().unwrap() {
            assert_ne!(entries, new[&name], "{name}: nothing was written");
        }
        assert_ne!(harness.unread_events().unwrap(), 0);

        harness.renew().unwrap();
        for (name, entries) in harness.content().unwrap() {
            assert_eq!(entries, new[&name], "{name}");
        }
        assert_eq!(harness.unread_events().unwrap(), 0);
    });
}
