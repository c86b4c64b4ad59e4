//! Settings of a card that change while programs are attached to it: traffic goes on, or the agent
//! reports what happened.

use traffic_policy_dataplane::Kernel;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::netns::Namespace;
use traffic_policy_testing::pace::until;

use crate::fixture::{CardTestbed, START};
use crate::flows::served;
use crate::wires::{Wire, ip, run};

const BYTES: u64 = 200_000;

fn goes_on(fixture: &CardTestbed, agent: &Agent, what: &str) {
    let before = fixture.state(agent);
    let served = fixture.requests().and_then(|()| fixture.transfers(BYTES));
    served.unwrap_or_else(|error| {
        let changed = before.until(&fixture.state(agent));
        panic!("{what}: {error:#}\n{}\nCounted meanwhile:\n{changed}", agent.log())
    });
}

fn has_xdp(fixture: &CardTestbed) -> bool {
    fixture.node.netlink(async |net| net.has_xdp("eth0").await).unwrap()
}

/// Sets the MTU of the node's card alone.
fn set_mtu(fixture: &CardTestbed, mtu: u32) {
    ip(Some(&fixture.node), &["link", "set", "eth0", "mtu", &mtu.to_string()]).unwrap();
}

/// Sets the MTU of all devices between the client and the pod: no host on a wire may send frames
/// that another cannot receive.
fn set_all_mtus(fixture: &CardTestbed, mtu: u32) {
    let devices: [(&Namespace, &str); 6] = [
        (&fixture.node, "eth0"),
        (&fixture.near, "eth0"),
        (&fixture.near, "client0"),
        (&fixture.client, "eth0"),
        (&fixture.node, "pod0"),
        (&fixture.pod, "eth0"),
    ];
    for (namespace, device) in devices {
        ip(Some(namespace), &["link", "set", device, "mtu", &mtu.to_string()]).unwrap();
    }
}

/// The MTU as `ip` prints it.
fn mtu_of(fixture: &CardTestbed, device: &str) -> String {
    let output = run(Some(&fixture.node), "ip", &["-json", "link", "show", "dev", device]).unwrap();
    let links: serde_json::Value = serde_json::from_slice(&output).unwrap();
    links[0]["mtu"].to_string()
}

/// A smaller MTU, and as many queues as the driver permits.
#[test]
fn mtu_and_queues() {
    let test = "changed::mtu_and_queues";
    let Some([first, second]) = Wire::find(test, [0, 1]) else { return };
    let fixture = CardTestbed::build(first, second).unwrap();
    // A failure below is then the driver's refusal, not a missing `ethtool`.
    run(Some(&fixture.node), "ethtool", &["-l", "eth0"]).unwrap();
    for attach in ["xdp", "tc"] {
        let agent = fixture.agent(attach).unwrap().start().unwrap();
        agent.wait_ready(START).unwrap();
        for mtu in [1400, 1500] {
            set_mtu(&fixture, mtu);
            goes_on(&fixture, &agent, &format!("{attach}, MTU {mtu}"));
        }
        for queues in ["1", "2"] {
            let change = ["-L", "eth0", "combined", queues];
            match run(Some(&fixture.node), "ethtool", &change) {
                Ok(_) => println!("{attach}: {queues} queues"),
                // The driver keeps its queues while XDP uses them.
                Err(error) => {
                    println!("{attach}: {error:#}");
                    assert_eq!(attach, "xdp", "{error:#}");
                }
            }
            goes_on(&fixture, &agent, &format!("{attach}, {queues} queues"));
        }
    }
}

/// Frames become longer than a page, and short again. A driver that keeps each in one page accepts
/// no XDP program meanwhile (virtio_net before Linux 6.3): the agent reports it, and TC takes over.
fn beyond_a_page(test: &str, attach: &str, words: &[&str]) {
    let Some([first, second]) = Wire::find(test, [3, 0]) else { return };
    let fixture = CardTestbed::build(first, second).unwrap();
    set_all_mtus(&fixture, 1500);
    let agent = fixture.agent(attach).unwrap().start().unwrap();
    agent.wait_ready(START).unwrap();
    goes_on(&fixture, &agent, "MTU 1500");
    assert!(has_xdp(&fixture), "{}", agent.log());
    // A VLAN device follows a change of the card's MTU downwards only.
    ip(Some(&fixture.node), &["link", "add", "link", "eth0", "name", "eth0.7", "type", "vlan", "id", "7"])
        .unwrap();
    set_mtu(&fixture, 9000);
    ip(Some(&fixture.node), &["link", "set", "eth0.7", "mtu", "9000"]).unwrap();
    set_all_mtus(&fixture, 9000);
    let stays = Kernel::running().unwrap().at_least(6, 3);
    if !stays {
        println!("{}", agent.wait_said(words, START).unwrap());
    }
    let before = served(&agent, "xdp").unwrap();
    goes_on(&fixture, &agent, "MTU 9000");
    let by_xdp = served(&agent, "xdp").unwrap() - before;
    assert_eq!(by_xdp != 0, stays, "{by_xdp} packets by XDP\n{}", agent.log());
    assert_eq!(
        ["eth0", "eth0.7"].map(|device| mtu_of(&fixture, device)),
        ["9000", "9000"],
        "{}",
        agent.log()
    );
    assert_eq!(has_xdp(&fixture), stays, "{}", agent.log());
    set_all_mtus(&fixture, 1500);
    until("XDP to come back", START, || has_xdp(&fixture));
    goes_on(&fixture, &agent, "MTU 1500 again");
}

#[test]
fn mtu_beyond_a_page_auto() {
    let words = ["XDP is not possible here, TC takes all packets", "eth0", "MTU"];
    beyond_a_page("changed::mtu_beyond_a_page_auto", "auto", &words);
}

#[test]
fn mtu_beyond_a_page_xdp() {
    let words = ["not attached, trying again", "eth0", "MTU"];
    beyond_a_page("changed::mtu_beyond_a_page_xdp", "xdp", &words);
}
