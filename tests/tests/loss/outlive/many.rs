//! A thousand connections, and 250 new ones a second, through a router that spreads them over the
//! nodes: agents are started again one after the other, a node is added, one is removed, and one
//! that is in front dies while pods are replaced. Only connections to pods that go may end.

use std::net::SocketAddr;
use std::thread::sleep;
use std::time::{Duration, Instant};

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::lease;
use traffic_policy_testing::pace::pace;
use traffic_policy_testing::traffic::{HeldConnections, NewConnections};

use super::{OUTLIVE, VIPS, await_endpoints, service, some};
use crate::cluster::PATIENCE;
use crate::quiet;

const CONNECTIONS: usize = 1_000;
/// The time between two requests of a connection.
const PAUSE: Duration = Duration::from_millis(500);
/// The time in which every connection has had requests: twice [`PAUSE`] and more.
const LOOK: Duration = Duration::from_millis(1_200);
const NEW_PER_SECOND: u32 = 250;
/// The pace beyond which a machine cannot make that many, but is emulated.
const EMULATED: f64 = 5.0;

/// Nodes without pods are in front alone; the pods are on the third and fourth.
const PODS: [u8; 5] = [0, 0, 3, 3, 0];
/// The numbers of the pods that are endpoints.
const ENDPOINTS: [usize; 4] = [0, 1, 3, 4];

struct Scene {
    cluster: Cluster,
    flags: &'static [&'static str],
    began: Instant,
}

impl Scene {
    /// Starts a cluster of the first nodes, which are all in front.
    fn start(nodes: usize, flags: &'static [&'static str]) -> Self {
        let cluster = Cluster::start(Lab::builder().pods(&PODS)).unwrap();
        cluster.manifests.apply(&service(), &some(&cluster, &ENDPOINTS)).unwrap();
        let mut scene = Self { cluster, flags, began: Instant::now() };
        let all: Vec<_> = (1..=nodes).collect();
        scene.add(&all);
        scene.spread(&all);
        scene
    }

    /// Starts agents on further nodes; all say that they open packets.
    fn add(&mut self, numbers: &[usize]) {
        let Self { cluster, flags, .. } = self;
        let known = cluster.agents.len() + numbers.len();
        let leases: Vec<_> =
            cluster.lab.nodes()[..known].iter().map(|node| lease::opens(node, &Family::BOTH)).collect();
        cluster.manifests.write("leases", &leases).unwrap();
        for number in numbers {
            let agent = Agent::builder(&cluster.lab, cluster.lab.node(*number));
            cluster.agents.push(agent.attach("tc").flags(flags).start().unwrap());
        }
        for agent in &cluster.agents {
            agent.wait_ready(PATIENCE).unwrap();
        }
    }

    /// Makes the router spread everything over these nodes.
    fn spread(&self, numbers: &[usize]) {
        let nodes: Vec<_> = numbers.iter().map(|number| self.cluster.lab.node(*number)).collect();
        self.cluster.lab.spread_vip(VIPS[0], &nodes).unwrap();
    }

    fn hold(&mut self) -> HeldConnections {
        let target = SocketAddr::new(VIPS[0], 80);
        let client = self.cluster.lab.client().netns();
        let held = HeldConnections::start(client, &[target], CONNECTIONS, PAUSE).unwrap();
        // Every connection is established, and has had requests.
        sleep(LOOK);
        held
    }

    /// The number of new connections a second that this machine can make.
    fn rate() -> u32 {
        let slower = if pace() < EMULATED { 1.0 } else { pace() };
        (f64::from(NEW_PER_SECOND) / slower).ceil() as u32
    }

    /// Lets every connection have requests, after what has happened.
    fn look(&mut self, what: &str) {
        sleep(LOOK);
        println!("{:.1?}: {what}", self.began.elapsed());
    }

    /// The flows of a node to pods of other nodes, as its agent counts them.
    fn through(&self, number: usize) -> usize {
        let flows = self.cluster.agents[number - 1].json(&["flows"]).unwrap();
        flows.as_array().unwrap().iter().filter(|flow| flow["state"] == "assured").count()
    }
}

#[test]
fn a_thousand_connections_outlive_nodes_and_agents() {
    let _alone = quiet::alone();
    let mut scene = Scene::start(4, &OUTLIVE);
    let held = scene.hold();
    let target = SocketAddr::new(VIPS[0], 80);
    let client = scene.cluster.lab.client();
    let rate = Scene::rate();
    let new = NewConnections::start(client.netns(), rate, move |_| Some(target));
    for number in 0..scene.cluster.agents.len() {
        let agent = &mut scene.cluster.agents[number];
        agent.kill().unwrap();
        agent.start_again().unwrap();
        agent.wait_ready(PATIENCE).unwrap();
    }
    scene.look("the agents were started again");
    scene.add(&[5]);
    scene.spread(&[1, 2, 3, 4, 5]);
    scene.look("a node was added");
    scene.spread(&[1, 3, 4, 5]);
    scene.look("a node was removed");
    // Two of four pods are replaced; both still run while their endpoints go.
    for backends in [&[0, 1, 2, 3, 4][..], &[0, 2, 3, 4], &[0, 2, 3, 4, 5], &[0, 2, 3, 5]] {
        scene.cluster.manifests.endpoints(&service(), &some(&scene.cluster, backends)).unwrap();
        await_endpoints(&scene.cluster, backends.len());
    }
    let through = scene.through(1);
    scene.cluster.lab.cut(scene.cluster.lab.node(1)).unwrap();
    scene.spread(&[3, 4, 5]);
    // Requests that were under way are sent again, after 200 ms at least, and then twice that.
    scene.look("the node in front died");
    scene.look("requests were sent again");
    // The node in front does not see that a pod resets a connection, so a new one from the same
    // port of the client would still go to that pod.
    let new = new.finish();
    let gone = ["pod-3-2", "pod-4-2"];
    for pod in gone {
        scene.cluster.stop_server(pod);
    }
    scene.look("the replaced pods stopped");
    let held = held.finish();
    println!("{through} flows through the node that died; {held}; by pod {:?}; new: {new}", held.by_pod);
    assert!(through > CONNECTIONS / 8, "the control: {through} flows through the node that died");
    let ended: u64 = gone.iter().map(|pod| held.by_pod[*pod]).sum();
    assert!(ended > CONNECTIONS as u64 / 5, "{:?}", held.by_pod);
    assert_eq!((held.connections, held.broken.len() as u64), (CONNECTIONS as u64, ended), "{held}");
    assert_eq!(new.failed, 0, "{new}");
    assert!(new.ok > 4 * u64::from(rate), "{new}");
    let address = scene.cluster.lab.client().address(Family::V4);
    assert!(held.clients.iter().eq([&address]), "pods see the client: {:?}", held.clients);
}

/// The control: with the node's own address what passed the node is lost, and what the router moves
/// from other nodes is, too; new connections are not concerned.
#[test]
fn snat_cuts_what_passed_the_node() {
    let _alone = quiet::alone();
    let mut scene = Scene::start(4, &["--algorithm", "maglev"]);
    let held = scene.hold();
    let through = scene.through(1);
    scene.cluster.lab.cut(scene.cluster.lab.node(1)).unwrap();
    scene.spread(&[2, 3, 4]);
    scene.look("the node in front died");
    scene.look("requests were sent again");
    let held = held.finish();
    println!("{through} flows through the node that died; {held}");
    let lost = held.broken.len();
    assert!(through > CONNECTIONS / 8 && lost >= through, "{through} through the node, {lost} lost: {held}");
}
