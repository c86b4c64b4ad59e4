//! The counts of packets of each Service by outcome agree with the packets that were sent, while
//! flows exist and after they are gone.

use std::time::Duration;

use serde_json::Value;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::pace::until;
use traffic_policy_testing::traffic::Outcome;

/// One port of a Service, with the protocol and family that are used here.
fn port(agent: &Agent, name: &str) -> Value {
    let ports = agent.json(&["services", name]).unwrap();
    let ports = ports.as_array().unwrap();
    ports.iter().find(|port| port["protocol"] == "UDP" && port["family"] == "IPv4").unwrap().clone()
}

fn packets(port: &Value, outcome: &str) -> u64 {
    port["counts"][outcome]["packets"].as_u64().unwrap_or(0)
}

fn bytes(port: &Value, outcome: &str) -> u64 {
    port["counts"][outcome]["bytes"].as_u64().unwrap_or(0)
}

const ASKED: u64 = 12;

#[test]
fn agree_with_what_was_sent() {
    for attach in ["tc", "xdp"] {
        let cluster = Cluster::start(Lab::builder().pods(&[1, 1, 0])).unwrap();
        let backends = cluster.backends();
        let (here, elsewhere) = backends.split_at(1);
        let service = |name, policy, number: u16| Cluster::node_port(name, policy, 30080 + number);
        cluster.manifests.apply(&service("web", Policy::Cluster, 0), &backends).unwrap();
        cluster.manifests.apply(&service("near", Policy::Local, 1), here).unwrap();
        cluster.manifests.apply(&service("far", Policy::Local, 2), elsewhere).unwrap();
        cluster.manifests.apply(&service("none", Policy::Cluster, 3), &[]).unwrap();
        // A sweep runs every 2 s, and deletes what the previous one has marked.
        let flags = ["--idle-udp", "8s", "--idle-udp-answered", "8s"];
        let agent =
            Agent::builder(&cluster.lab, cluster.lab.node(1)).attach(attach).flags(&flags).start().unwrap();
        agent.wait_ready(Duration::from_secs(20)).unwrap();
        // Each probe has a source port of its own: the kernel gives the port of a closed socket to
        // another one now and then, and two probes from one port are one flow.
        let ask = |number: u16, source_port: u16| {
            let to = cluster.at(1, Family::V4, 30080 + number);
            let probe = Protocol::Udp.probe(to).source_port(source_port);
            probe.from(cluster.lab.client().netns()).unwrap()
        };
        for source_port in (20_000..).take(ASKED as usize) {
            ask(0, source_port).answer().unwrap();
            ask(1, source_port).answer().unwrap();
        }
        for source_port in 20_000..20_003 {
            assert_eq!(ask(2, source_port), Outcome::Silent);
            assert!(ask(3, source_port).is_refused_at_once());
        }

        let expect = |when: &str| {
            let web = port(&agent, "default/web");
            let (forwarded, delivered) = (packets(&web, "forwarded"), packets(&web, "delivered"));
            assert_eq!(forwarded + delivered, ASKED, "{attach}, {when}: {web}");
            assert_eq!(packets(&web, "replied"), forwarded, "{attach}, {when}: {web}");
            assert_eq!(packets(&web, "replied-local"), delivered, "{attach}, {when}: {web}");
            let near = port(&agent, "near");
            assert_eq!(packets(&near, "delivered"), ASKED, "{attach}, {when}: {near}");
            assert_eq!(packets(&near, "replied-local"), ASKED, "{attach}, {when}: {near}");
            // IP and UDP headers and a request of some letters.
            assert!(bytes(&near, "delivered") > ASKED * 28, "{attach}, {when}: {near}");
            let far = port(&agent, "far");
            assert_eq!(packets(&far, "dropped-no-local-endpoint"), 3, "{attach}, {when}: {far}");
            assert!(bytes(&far, "dropped-no-local-endpoint") > 3 * 28, "{attach}, {when}: {far}");
            let none = port(&agent, "none");
            assert_eq!(packets(&none, "rejected-no-endpoint"), 3, "{attach}, {when}: {none}");
            (web["flows"].as_u64().unwrap(), near)
        };
        let (flows, before) = expect("while flows stand");
        assert_eq!(flows, ASKED, "{attach}");
        until(&format!("{attach}: the end of the flows"), Duration::from_secs(60), || {
            ["near", "web"].iter().all(|name| port(&agent, name)["flows"] == 0)
        });
        let (_, after) = expect("after the sweep");
        assert_eq!(after["counts"], before["counts"], "{attach}");
        // The counters of the hooks agree. (TC sends answers for which XDP has no room.)
        for outcome in ["dropped-no-local-endpoint", "rejected-no-endpoint"] {
            let packets: u64 =
                ["xdp", "tc-ingress"].iter().map(|hook| agent.packets(hook, outcome).unwrap()).sum();
            assert_eq!(packets, 3, "{attach}: {outcome}");
        }
    }
}
