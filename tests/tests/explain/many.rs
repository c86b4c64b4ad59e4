//! `explain` on ten thousand flows at once.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::explain::{self, Flow};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::pace::scaled;

const FLOWS: u16 = 10_000;
/// The time limit, far above the time of a debug build on a busy machine, and far below that of
/// work that is quadratic in the flows.
const LIMIT: Duration = Duration::from_secs(60);

fn flows(cluster: &Cluster) -> Vec<Flow> {
    let flow = |number: u16| {
        let family = if number.is_multiple_of(2) { Family::V4 } else { Family::V6 };
        let [high, low] = number.to_be_bytes();
        let source: IpAddr = match family {
            Family::V4 => Ipv4Addr::new(198, 18, high, low).into(),
            Family::V6 => Ipv6Addr::new(0x2001, 0xdb8, 0x18, 0, 0, 0, 0, number).into(),
        };
        let port = 30_080 + number % 3;
        let protocol = if number.is_multiple_of(5) { "UDP" } else { "TCP" };
        let source = SocketAddr::new(source, 1024 + number);
        let flow = Flow::new(protocol, source, cluster.at(1, family, port));
        let from = ["external", "external", "pod", "node"][usize::from(number % 4)];
        Flow { name: number.to_string(), from: Some(from), ..flow }
    };
    (0..FLOWS).map(flow).collect()
}

#[test]
fn within_seconds() {
    let cluster = Cluster::start(Lab::builder().pods(&[2, 1])).unwrap();
    for (number, policy) in [(30_080, Policy::Cluster), (30_081, Policy::Local)] {
        let service = Cluster::node_port(&format!("web-{number}"), policy, number);
        cluster.manifests.apply(&service, &cluster.backends()).unwrap();
    }
    let agent = Agent::builder(&cluster.lab, cluster.lab.node(1)).attach("xdp").start().unwrap();
    agent.wait_ready(Duration::from_secs(20)).unwrap();
    let flows = flows(&cluster);
    let manifests = cluster.lab.manifests();
    for place in ["live", "offline"] {
        let start = Instant::now();
        let answers = match place {
            "live" => explain::live(&agent, &flows, &[]).unwrap(),
            _ => explain::offline(&manifests, &cluster.lab.node(1).name, &flows, &[]).unwrap(),
        };
        let took = start.elapsed();
        println!("{FLOWS} flows {place} in {took:?}");
        assert!(took < scaled(LIMIT), "{FLOWS} flows {place} took {took:?}");
        for (flow, answer) in flows.iter().zip(&answers) {
            // No Service has the third port.
            let wanted = if flow.destination.port() == 30_082 { "unhandled" } else { "endpoints" };
            assert_eq!(answer.verdict, wanted, "{place} {flow:?} {:?}", answer.steps);
        }
    }
}
