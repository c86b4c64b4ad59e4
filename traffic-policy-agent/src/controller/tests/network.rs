//! Changes of the network become epochs.

use traffic_policy_dataplane::{Mode, node::Event};

use super::{super::*, fake::Fake};

/// The run loop has other work while a burst of changes is collected: it asks when that ends.
#[tokio::test]
async fn changes_that_follow_each_other_raise_one_epoch() {
    let (netlink, _events) = Network::connect().unwrap();
    let mut network = NodeNetwork::new(netlink, Vec::new(), Mode::Auto);
    let mut fake = Fake::default();
    assert_eq!(network.burst_ends(), None);
    network.note(Event::Route);
    let ends = network.burst_ends();
    assert!(ends.is_some_and(|ends| ends > Instant::now()));
    network.note(Event::Address);
    assert_eq!(network.burst_ends(), ends, "later changes do not put it off");
    assert!(network.follow_burst(&mut fake), "addresses changed");
    assert_eq!(network.burst_ends(), None);
    assert!(network.devices.needs_rescan());
    network.note(Event::Route);
    assert!(!network.follow_burst(&mut fake));
    assert_eq!(fake.calls().raised, [Changed::Routes; 2]);
}
