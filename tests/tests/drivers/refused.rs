//! Cards whose driver refuses XDP: `check` reports it beforehand, `run --attach xdp` exits with the
//! cause and the fix, and `--attach auto` serves by TC. Where a newer kernel's driver does not
//! refuse, XDP serves.

use traffic_policy_dataplane::Kernel;

use crate::fixture::{CardTestbed, START};
use crate::flows::{LEAST, nothing_failed, served};
use crate::wires::Wire;

const BYTES: u64 = 1_000_000;

/// Tests a refusal; `cause` are words of the message.
fn refused(test: &str, number: u8, cause: &[&str]) {
    let Some([first, second]) = Wire::find(test, [number, 0]) else { return };
    let fixture = CardTestbed::build(first, second).unwrap();
    let words = [&["eth0"], cause].concat();
    let checked = fixture.check("xdp", &["eth0"]).unwrap();
    checked.has("error", &words, "--attach tc");
    assert_eq!(checked.code, Some(1), "{checked:#?}");

    let mut agent = fixture.agent("xdp").unwrap().start().unwrap();
    assert_eq!(agent.wait_ended(START).unwrap(), Some(1), "{}", agent.log());
    let words = [&words[..], &["--attach tc"]].concat();
    let log = agent.log();
    let line = log.lines().find(|line| words.iter().all(|word| line.contains(word)));
    println!("run: {}", line.unwrap_or_else(|| panic!("no line with {words:?} in\n{log}")));

    let agent = fixture.agent("auto").unwrap().start().unwrap();
    agent.wait_ready(START).unwrap();
    fixture.requests().unwrap();
    fixture.transfers(BYTES).unwrap();
    nothing_failed(&agent).unwrap();
    assert!(served(&agent, "tc-ingress").unwrap() > LEAST);
    fixture.check("auto", &["eth0"]).unwrap().has("warning", &["eth0", "TC"], "--attach tc");
}

/// virtio_net accepts frames of several buffers since Linux 6.3: [`crate::changed`] has the rest.
#[test]
fn long_frames() {
    let test = "refused::long_frames";
    if !Kernel::running().unwrap().at_least(6, 3) {
        return refused(test, 3, &["MTU"]);
    }
    let Some([first, second]) = Wire::find(test, [3, 0]) else { return };
    let fixture = CardTestbed::build(first, second).unwrap();
    let checked = fixture.check("xdp", &["eth0"]).unwrap();
    assert_eq!(checked.code, Some(0), "{checked:#?}");
    let agent = fixture.agent("xdp").unwrap().start().unwrap();
    agent.wait_ready(START).unwrap();
    fixture.requests().unwrap();
    fixture.transfers(BYTES).unwrap();
    nothing_failed(&agent).unwrap();
    assert!(served(&agent, "xdp").unwrap() > LEAST);
}

#[test]
fn fixed_guest_offloads() {
    refused("refused::fixed_guest_offloads", 5, &["guest offloads"]);
}
