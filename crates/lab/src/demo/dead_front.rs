//! The death of the node in front, while a thousand connections are open: with its address as their
//! source, and with direct forwarding and Maglev tables; also while a pod is replaced. A router
//! spreads the connections over three nodes, and after the death over two: that also moves
//! connections between those two.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use traffic_policy_testing::lab::{Family, Lab, Pod};
use traffic_policy_testing::object::{Backend, Port, Service, lease};
use traffic_policy_testing::pace::poll;
use traffic_policy_testing::traffic::{
    HeldConnections, NewConnections, Outcome, Probe, Server, connections, held,
};

use super::cluster::{DemoCluster, RATE, section};

/// Connections of each play.
pub const CONNECTIONS: usize = 1_000;
/// The time between two requests of a connection.
const PAUSE: Duration = Duration::from_millis(500);
/// The time in which every connection has had requests: twice [`PAUSE`] and more.
const LOOK: Duration = Duration::from_millis(1_200);
const PORT: u16 = 80;
/// The port of servers that are this scene's own: one of them is stopped.
const POD_PORT: u16 = 8090;
/// The node in front that dies, which has no pod, and the others.
const FRONT: usize = 3;
const OTHERS: [usize; 2] = [1, 2];

/// A way of the packets, with a Service and an address of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Snat,
    DirectByMaglev,
}

impl Way {
    pub const BOTH: [Self; 2] = [Self::Snat, Self::DirectByMaglev];

    fn name(self) -> &'static str {
        match self {
            Self::Snat => "snat, random",
            Self::DirectByMaglev => "direct, maglev",
        }
    }

    fn service(self, vip: IpAddr) -> Service {
        let port = Port::tcp(PORT, POD_PORT);
        match self {
            Self::Snat => Service::new("translated").port(port).vip(vip),
            Self::DirectByMaglev => Service::new("unchanged")
                .port(port)
                .vip(vip)
                .annotation("traffic-policy.io/forwarding", "direct")
                .annotation("traffic-policy.io/algorithm", "maglev"),
        }
    }
}

/// Changes of the pods meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pods {
    Stay,
    /// One of two is replaced; it serves its connections until the router has moved all, and stops.
    Replaced,
}

impl Pods {
    pub const BOTH: [Self; 2] = [Self::Stay, Self::Replaced];
}

/// Counts of one play.
#[derive(Clone, Debug)]
pub struct Counts {
    pub held: held::Report,
    pub new: connections::Report,
    /// Open connections through the node that died.
    pub through: usize,
    /// Those that ended with the pod that was replaced.
    pub ended: u64,
}

impl Counts {
    /// The number of connections that broke although their pod had not gone.
    pub fn cut(&self) -> u64 {
        self.held.broken.len() as u64 - self.ended
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { held, new, through, ended } = self;
        let by_pod = &held.by_pod;
        write!(
            f,
            "{through} through the node that died, {ended} ended with their pod, {} cut; ",
            self.cut()
        )?;
        write!(f, "{held}; by pod {by_pod:?}; new: {new}")
    }
}

/// Plays the scene once, and revives the node at the end. Each play has a load balancer address of
/// its own, so that no source port of the client meets the flow of an earlier play.
pub fn play(cluster: &DemoCluster, way: Way, pods: Pods) -> Result<Counts> {
    let base = &cluster.base;
    let lab = &base.lab;
    let leases: Vec<_> = lab.nodes().iter().map(|node| lease::opens(node, &Family::BOTH)).collect();
    base.manifests.write("leases", &leases)?;
    let vip: IpAddr = Ipv4Addr::new(203, 0, 113, 81 + 2 * (way as u8) + pods as u8).into();
    let service = way.service(vip);
    let [stays, goes, comes] = places(lab);
    let backends = |pods: &[&Pod]| pods.iter().map(|pod| Backend::of(pod)).collect::<Vec<_>>();
    let serve = |pod: &&Pod| Server::start(pod, POD_PORT, &base.ledger);
    let mut servers: Vec<_> = [stays, comes, goes].iter().map(serve).collect::<Result<_>>()?;
    base.manifests.apply(&service, &backends(&[stays, goes]))?;
    // All nodes serve the address before the first connection.
    for node in lab.nodes() {
        lab.route_vip(vip, node)?;
        await_pods(cluster, way, vip, &[stays, goes])?;
    }
    let nodes = |numbers: &[usize]| numbers.iter().map(|number| lab.node(*number)).collect::<Vec<_>>();
    lab.spread_vip(vip, &nodes(&[OTHERS[0], OTHERS[1], FRONT]))?;
    let (client, target) = (lab.client().netns(), SocketAddr::new(vip, PORT));
    let held = HeldConnections::start(client, &[target], CONNECTIONS, PAUSE)?;
    let new = NewConnections::start(client, RATE, move |_| Some(target));
    // Each connection has had requests before the node dies.
    sleep(LOOK);
    let through = through(cluster, target)?;
    if pods == Pods::Replaced {
        base.manifests.endpoints(&service, &backends(&[stays, goes, comes]))?;
    }
    lab.cut(lab.node(FRONT))?;
    lab.spread_vip(vip, &nodes(&OTHERS))?;
    if pods == Pods::Replaced {
        base.manifests.endpoints(&service, &backends(&[stays, comes]))?;
    }
    // The connections go on for a while: that is what the scene shows. Requests that were under way
    // are sent again, after 200 ms at least, and then twice that.
    sleep(2 * LOOK);
    // A node in front does not see that a pod resets a connection, so a new one from the same port
    // of the client would still go to that pod.
    let new = new.finish();
    if pods == Pods::Replaced {
        servers.pop();
        // Each connection to that pod asks again, and ends.
        sleep(LOOK);
    }
    let held = held.finish();
    let gone = (pods == Pods::Replaced).then_some(&goes.name);
    let ended = gone.and_then(|pod| held.broken_by_pod.get(pod)).copied().unwrap_or(0);
    lab.mend(lab.node(FRONT))?;
    lab.unroute_vip(vip)?;
    base.manifests.delete(&service)?;
    Ok(Counts { held, new, through, ended })
}

/// Returns the pod that stays, the one that is replaced, and the one that comes in its place.
fn places(lab: &Lab) -> [&Pod; 3] {
    [lab.node(1).pod(1), lab.node(2).pod(1), lab.node(2).pod(2)]
}

/// Returns the number of open connections to a frontend through the node that is to die.
fn through(cluster: &DemoCluster, frontend: SocketAddr) -> Result<usize> {
    let flows = cluster.base.agents[FRONT - 1].json(&["flows"])?;
    let frontend = frontend.to_string();
    let flows = flows.as_array().context("flows are a list")?;
    Ok(flows.iter().filter(|flow| flow["frontend"] == *frontend && flow["state"] == "assured").count())
}

/// Waits until these pods answer at the address, to a client whose address they see if packets
/// travel unchanged.
fn await_pods(cluster: &DemoCluster, way: Way, vip: IpAddr, wanted: &[&Pod]) -> Result<()> {
    let base = &cluster.base;
    let to = SocketAddr::new(vip, PORT);
    let mut pods = BTreeSet::new();
    let all = poll(Duration::from_secs(10), || {
        // A node that does not know the address yet says that it has no route.
        if let Ok(Outcome::Answered(answer)) = Probe::tcp(to).from(base.lab.client().netns())
            && (way == Way::Snat || answer.client.ip() == cluster.client())
        {
            pods.insert(answer.pod);
        }
        (pods.len() >= wanted.len()).then_some(())
    });
    all.with_context(|| format!("{}: only {pods:?} answer as they should", way.name()))
}

pub(super) fn show(cluster: &DemoCluster) -> Result<Vec<String>> {
    section(
        "8. THE NODE IN FRONT THAT DIES",
        "A router spreads 1,000 open connections, and 250 new ones a second, over all nodes; node-3, which has no pod, dies,\n\
         and the router spreads them anew over node-1 and node-2, which moves connections of these, too. With snat those\n\
         had another node's address as their source, and are reset; with `forwarding: direct` and `algorithm: maglev` the\n\
         nodes find the same pods. Then the same while pod-2-1 is replaced by pod-2-2: what is open to it ends with it.",
    );
    println!(
        "  {:<16} {:<8} CONNECTIONS REQUESTS  BY node-3    CUT  ENDED WITH POD     NEW  FAILED",
        "SERVICE", "PODS"
    );
    let mut differences = Vec::new();
    for pods in Pods::BOTH {
        for way in Way::BOTH {
            let counts = play(cluster, way, pods)?;
            let Counts { held, new, through, ended } = &counts;
            println!(
                "  {:<16} {:<8} {:>11} {:>8} {through:>10} {:>6} {ended:>15} {:>7} {:>7}",
                way.name(),
                if pods == Pods::Stay { "stay" } else { "replaced" },
                held.connections,
                held.requests,
                counts.cut(),
                new.ok + new.failed,
                new.failed,
            );
            if way == Way::DirectByMaglev && counts.cut() > 0 {
                differences.push(format!("direct connections were cut: {counts}"));
            }
        }
    }
    Ok(differences)
}
