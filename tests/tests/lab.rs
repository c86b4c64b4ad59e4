//! The lab itself: what reaches what, and that nothing stays behind.

use std::time::Instant;
use traffic_policy_tests::lab::Lab;

#[test]
fn up_and_down() {
    for _ in 0..3 {
    let start = Instant::now();
    let lab = Lab::builder().nodes(3).pods_per_node(2).build().unwrap();
    let up = start.elapsed();
    println!("{lab}");
    let start = Instant::now();
    drop(lab);
    println!("up {up:?}, down {:?}", start.elapsed());
    }
}
