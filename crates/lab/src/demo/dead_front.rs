//! The death of the node in front, while connections through it are open: with its address as their
//! source, and with direct forwarding and Maglev tables. A router sends their packets to another
//! node then.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use traffic_policy_testing::cluster::TARGET;
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::object::{Port, Service, lease};
use traffic_policy_testing::pace::scaled;
use traffic_policy_testing::traffic::held::Report;
use traffic_policy_testing::traffic::{HeldConnections, Outcome, Probe};

use super::cluster::{DemoCluster, section};

/// Connections of each Service.
pub const CONNECTIONS: usize = 40;
/// The time between two requests of a connection.
const PAUSE: Duration = Duration::from_millis(50);
/// The time in which every connection has had requests: several times [`PAUSE`].
const LOOK: Duration = Duration::from_millis(500);
/// The same after the death: requests that were under way are sent again, after 200 ms at least,
/// and then twice that.
const REST: Duration = Duration::from_millis(1500);
const PORT: u16 = 80;

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

    fn vip(self) -> IpAddr {
        let last = if self == Self::Snat { 81 } else { 82 };
        IpAddr::V4(Ipv4Addr::new(203, 0, 113, last))
    }

    fn service(self) -> Service {
        let port = Port::tcp(PORT, TARGET);
        match self {
            Self::Snat => Service::new("translated").port(port).vip(self.vip()),
            Self::DirectByMaglev => Service::new("unchanged")
                .port(port)
                .vip(self.vip())
                .annotation("traffic-policy.io/forwarding", "direct")
                .annotation("traffic-policy.io/algorithm", "maglev"),
        }
    }
}

/// Plays the scene: the connections of each way, in the order of [`Way::BOTH`]. The node is alive
/// again after it.
pub fn play(cluster: &DemoCluster) -> Result<[Report; 2]> {
    let base = &cluster.base;
    let (front, next) = (base.lab.node(3), base.lab.node(2));
    let leases: Vec<_> = base.lab.nodes().iter().map(|node| lease::opens(node, &Family::BOTH)).collect();
    base.manifests.write("leases", &leases)?;
    for way in Way::BOTH {
        base.manifests.apply(&way.service(), &base.backends())?;
        base.lab.route_vip(way.vip(), next)?;
    }
    // Both nodes serve both ways before the first connection.
    for node in [next, front] {
        for way in Way::BOTH {
            base.lab.route_vip(way.vip(), node)?;
            await_pods(cluster, way)?;
        }
    }
    let client = base.lab.client().netns();
    let start =
        |way: Way| HeldConnections::start(client, &[SocketAddr::new(way.vip(), PORT)], CONNECTIONS, PAUSE);
    let meters = [start(Way::Snat)?, start(Way::DirectByMaglev)?];
    // Each connection has had requests before the node dies.
    sleep(LOOK);
    base.lab.cut(front)?;
    for way in Way::BOTH {
        base.lab.route_vip(way.vip(), next)?;
    }
    // The connections go on for a while: that is what the scene shows.
    sleep(REST);
    let reports = meters.map(HeldConnections::finish);
    base.lab.mend(front)?;
    for way in Way::BOTH {
        base.lab.unroute_vip(way.vip())?;
        base.manifests.delete(&way.service())?;
    }
    Ok(reports)
}

/// Waits until every pod answers at the address, to a client whose address it sees if packets
/// travel unchanged.
fn await_pods(cluster: &DemoCluster, way: Way) -> Result<()> {
    let base = &cluster.base;
    let (start, to) = (Instant::now(), SocketAddr::new(way.vip(), PORT));
    let mut pods = BTreeSet::new();
    while pods.len() < base.backends().len() {
        ensure!(
            start.elapsed() < scaled(Duration::from_secs(10)),
            "{}: only {pods:?} answer as they should",
            way.name()
        );
        // A node that does not know the address yet says that it has no route.
        let Ok(Outcome::Answered(answer)) = Probe::tcp(to).from(base.lab.client().netns()) else {
            // The pause lies between two attempts of a poll that has a limit.
            sleep(Duration::from_millis(20));
            continue;
        };
        let is_kept = answer.client.ip() == cluster.client();
        if way == Way::Snat || is_kept {
            pods.insert(answer.pod);
        }
    }
    Ok(())
}

pub(super) fn show(cluster: &DemoCluster) -> Result<Vec<String>> {
    section(
        "8. THE NODE IN FRONT THAT DIES",
        "node-3 has no pod: it is in front of two load balancer's addresses, each with 40 open connections, and dies. The\n\
         router sends their packets to node-2, which has never seen them. With snat they had node-3's address as their\n\
         source, and are reset; with `forwarding: direct` and `algorithm: maglev` node-2 finds the same pods.",
    );
    let reports = play(cluster)?;
    println!("  {:<16} CONNECTIONS REQUESTS    CUT   CLIENT ADDRESS AT THE PODS", "SERVICE");
    for (way, report) in Way::BOTH.iter().zip(&reports) {
        let seen: Vec<_> = report.clients.iter().map(ToString::to_string).collect();
        println!(
            "  {:<16} {:>11} {:>8} {:>6}   {}",
            way.name(),
            report.connections,
            report.requests,
            report.broken.len(),
            seen.join(", ")
        );
    }
    let [_, direct] = &reports;
    Ok(direct
        .broken
        .first()
        .map(|error| format!("a direct connection was cut: {error}"))
        .into_iter()
        .collect())
}
