//! Replacement of another layout version, which continues to serve until all of this one's programs
//! are in place.

use super::{QUICK, answers, free_port, running::Running, status, write};

async fn replacing(devices: &[&str], failing_hops: usize) -> Running {
    Running::start_on(devices, QUICK, |folder, fake| {
        write(folder, "web", "Cluster", 0, "here");
        let mut calls = fake.calls();
        (calls.others, calls.failing_hops) = (true, failing_hops);
    })
    .await
}

/// An earlier start of this version was killed half-way: nothing is attached to when the maps are
/// filled, and forgetting all other devices would detach the programs that serve.
#[tokio::test]
async fn nothing_is_forgotten_before_its_links_are_taken_over() {
    let running = replacing(&[], 0).await;
    running.until("replaced", |calls| calls.dropped > 0).await;
    assert_eq!(running.fake.calls().forgotten, [true]);
}

#[tokio::test]
async fn what_fails_on_the_way_is_tried_again() {
    let running = replacing(&[], 3).await;
    running.until("replaced", |calls| calls.dropped > 0).await;
    let calls = running.fake.calls();
    assert_eq!((calls.failing_hops, &calls.forgotten[..], calls.dropped), (0, &[true][..], 1));
}

/// No program can be attached to lo. The other version's programs are the only ones of the device
/// that lo stands for here.
#[tokio::test]
async fn a_device_that_cannot_be_attached_to_keeps_the_other_version() {
    let running = replacing(&["lo"], 0).await;
    running.until("taken over", |calls| calls.adopted).await;
    let sweeps = running.fake.calls().sweeps;
    running.until("looked after", |calls| calls.sweeps >= sweeps + 10).await;
    let calls = running.fake.calls();
    assert!(calls.others);
    assert_eq!((&calls.forgotten[..], calls.dropped), (&[][..], 0));
}

/// The other version's maps are no longer updated: no health-check port answers 200 because of maps
/// that no program reads yet.
#[tokio::test]
async fn nobody_is_healthy_while_the_other_version_serves() {
    let port = free_port().await;
    let running = Running::start_on(&["lo"], QUICK, |folder, fake| {
        write(folder, "web", "Local", port, "here");
        fake.calls().others = true;
    })
    .await;
    answers(port, Some(503)).await;
    let sweeps = running.fake.calls().sweeps;
    running.until("looked after", |calls| calls.sweeps >= sweeps + 10).await;
    assert!(!running.health.is_healthy());
    assert_eq!(status(port).await, Some(503));
    let said = format!("{:?}", running.health.report());
    assert!(said.contains("another layout version"), "{said}");
}

#[tokio::test]
async fn what_replaced_the_other_version_is_healthy() {
    let port = free_port().await;
    let running = Running::start(QUICK, |folder, fake| {
        write(folder, "web", "Local", port, "here");
        fake.calls().others = true;
    })
    .await;
    answers(port, Some(200)).await;
    assert!(running.health.is_healthy() && !running.fake.calls().others);
}
