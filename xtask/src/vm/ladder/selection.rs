//! The tests of a rung of the ladder: whole suites where processors are the machine's own; where
//! they are emulated, tests that represent those suites that would take hours. The announcement
//! before a machine boots, and each cell of the table, report what is left out.

/// The suite that needs network cards of the machine's own.
pub(super) const DRIVERS: &str = "drivers";
/// The demo, which is not a test program, but fails if a scene does not go as described.
pub(super) const DEMO: &str = "demo";

/// A suite of the ladder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Suite {
    pub(super) name: &'static str,
    /// The tests that run where processors are emulated, by their full names; none: all of them.
    pub(super) emulated: &'static [&'static str],
}

/// The suites, each after those it depends on. The first loads every program and holds each to its
/// limits.
pub(super) const SUITES: [Suite; 8] = [
    // The other tests examine the object alone.
    Suite {
        name: "budgets",
        emulated: &["budgets_of_the_kernel_hold", "far_from_what_the_verifier_walks_at_most"],
    },
    Suite { name: "check", emulated: &["verifier::what_the_verifier_refuses"] },
    Suite {
        name: "packets",
        emulated: &[
            "answers::no_endpoint_anywhere",
            "clock::jiffies_go_by_at_the_rate_that_the_kernel_reports",
            "conversation::the_end_of_a_connection",
            "direct::l2::packets_leave_as_they_came_but_for_mac_and_ttl",
            "direct::packets_leave_within_packets_to_the_endpoint",
            "direct::tunnel::the_node_in_front_opens_replies",
            "direct::tunnel::the_reply_goes_back_to_the_node_in_front",
            "direct::what_another_node_sends_is_opened_for_its_endpoint",
            "errors::about_flows_to_other_nodes",
            "extensions::both_ways",
            "forwarding::endpoints_on_other_nodes",
            "forwarding::endpoints_on_this_node",
            "forwarding::what_xdp_cannot_finish",
            "fragments::both_ways_to_another_node",
            "hops::a_moved_neighbour_is_noticed_when_an_epoch_or_time_says_so",
            "limits::a_table_full_of_flows_that_stand",
            "unassured::an_assured_flow_makes_no_room",
            "sweeping::each_state_has_its_time",
        ],
    },
    Suite {
        name: "policy",
        emulated: &[
            "direct::endpoints_see_the_client_tc",
            "direct::sctp::come_back_through_tc_within_ip",
            "matrix::one_agent_tc",
            "matrix::one_agent_xdp",
            "sctp_sockets::live_by_tc",
        ],
    },
    Suite { name: "sockets", emulated: &["conversations::cluster_ips_of_policy_cluster_and_local"] },
    Suite {
        name: "loss",
        emulated: &[
            "adopt_sctp::by_tc",
            "outlive::many::a_thousand_connections_outlive_nodes_and_agents",
            "outlive::many::snat_cuts_what_passed_the_node",
            "outlive::the_node_in_front_vanishes_within_udp",
            "preemption::with_policy_local_nobody_notices",
        ],
    },
    Suite { name: DRIVERS, emulated: &["changed::mtu_beyond_a_page_auto", "matrix::four_queues_xdp"] },
    // Three nodes and both policies, a preemption, a live switch.
    Suite { name: DEMO, emulated: &[] },
];

/// Returns the tests that run, for the announcement before a machine boots.
pub(super) fn announcement() -> String {
    let mut text =
        "vm: processors are emulated here; of suites that would take hours these tests run (--whole: all):\n"
            .to_owned();
    for suite in SUITES.iter().filter(|suite| !suite.emulated.is_empty()) {
        text += &format!("vm:   {}: {}\n", suite.name, suite.emulated.join(", "));
    }
    text
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::cargo;

    #[test]
    fn tests_that_stand_for_a_suite_exist() {
        for suite in &SUITES {
            for test in suite.emulated {
                let (module, name) = test.rsplit_once("::").unwrap_or(("main", test));
                let file = module.replace("::", "/");
                let paths = cargo::SUITES
                    .map(|suites| cargo::root().join(format!("{suites}/{}/{file}.rs", suite.name)));
                let path = paths.iter().find(|path| path.exists());
                let path = path.unwrap_or_else(|| panic!("there is none of {paths:?}"));
                let source = fs::read_to_string(path).unwrap();
                // A macro generates some of the names, so `fn` and the name cannot be searched for.
                let mut words = source.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
                assert!(words.any(|word| word == name), "{path:?} has no {name}");
            }
        }
    }

    #[test]
    fn what_is_left_out_is_said() {
        let text = announcement();
        for suite in &SUITES {
            let said = text.contains(&format!("vm:   {}: ", suite.name));
            assert_eq!(said, !suite.emulated.is_empty(), "{}", suite.name);
            assert!(suite.emulated.iter().all(|test| text.contains(test)));
        }
    }
}
