//! Endpoints that name no node: their next hop stands for it. One that dies is left out with what
//! is behind it; a router that lives is not, however many endpoints behind it are silent.

use std::net::SocketAddr;
use std::time::Duration;

use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::lab::{Family, Lab, plan};
use traffic_policy_testing::nftables;
use traffic_policy_testing::object::Backend;
use traffic_policy_testing::pace::{look_until, until};

use crate::watched::{Watched, web};

const PATIENCE: Duration = Duration::from_secs(30);

/// Three nodes with a pod each, of which the first alone is named by its endpoint, and an agent
/// there, by which all connections come.
fn watched() -> Watched {
    Watched::start_with(Lab::builder(), backends)
}

fn backends(cluster: &Cluster) -> Vec<Backend> {
    let mut backends = vec![Backend::of(cluster.lab.node(1).pod(1))];
    backends.extend([2, 3].map(|node| Backend::of(cluster.lab.node(node).pod(1)).without_node()));
    backends
}

impl Watched {
    /// Opens connections until exactly `names` are left out.
    fn until(&self, family: Family, names: &[String]) {
        look_until(
            &format!("{names:?} to be left out"),
            PATIENCE,
            || {
                self.connect_by(family, 1);
                self.left_out()
            },
            |left_out| left_out == names,
        );
    }

    fn dies_and_returns(&self, family: Family) {
        let far = self.far();
        let pod = &far.pod(1).name;
        assert!(self.connect_by(family, 2).by_pod.contains_key(pod), "the control: it was used");
        self.cluster.lab.cut(far).unwrap();
        self.until(family, &[format!("next hop {}", far.address(family))]);
        let report = self.connect_by(family, 2);
        assert!(report.is_clean() && !report.by_pod.contains_key(pod), "{report}");
        let at = SocketAddr::new(far.pod(1).address(family), TARGET).to_string();
        let output = self.agent.command(&["services", "web"]).unwrap();
        let service = String::from_utf8(output.stdout).unwrap();
        let line = service.lines().find(|line| line.contains(&at)).unwrap_or_default();
        assert!(line.contains("left out") && line.ends_with("its next hop is dead"), "{service}");
        self.cluster.lab.mend(far).unwrap();
        self.until(family, &[]);
        let report = self.connect_by(family, 2);
        assert!(report.is_clean() && report.by_pod.contains_key(pod), "{report}");
    }
}

#[test]
fn a_next_hop_that_dies_stands_for_the_node_that_is_not_named() {
    let watched = watched();
    for family in Family::BOTH {
        watched.dies_and_returns(family);
    }
}

#[test]
fn next_hops_and_routers_that_live_are_not_left_out() {
    let mut watched = watched();
    a_next_hop_that_answers_is_not_left_out(&watched);
    watched.far().pod(1).netns().delete_nft_table(nftables::Family::Ip, "deaf").unwrap();
    watched.begin_again();
    a_router_that_lives_is_not_left_out_for_the_silence_of_others(&watched);
}

/// The pod behind the next hop is silent, but the node itself answers.
fn a_next_hop_that_answers_is_not_left_out(watched: &Watched) {
    watched.far().pod(1).netns().nft_drop_input(nftables::Family::Ip, "deaf").unwrap();
    watched.connect(3);
    assert_eq!(watched.left_out(), [""; 0], "{}", watched.agent.log());
    assert!(watched.suspicions("alive") > 0.5, "nothing was suspected, so nothing is shown");
    assert!(watched.suspicions("dead") < 0.5, "{}", watched.agent.log());
}

/// An endpoint far behind it exists no more.
fn a_router_that_lives_is_not_left_out_for_the_silence_of_others(watched: &Watched) {
    let gone = plan::client(0);
    // The client itself is that endpoint: nothing reaches its port by the router.
    let drop = format!(
        "table ip gone {{ chain forward {{ type filter hook forward priority 0; ip daddr {} tcp dport {TARGET} drop\n }}\n }}\n",
        gone.v4
    );
    watched.cluster.lab.router().feed("nft", &["-f", "-"], &drop).unwrap();
    let with_it = [backends(&watched.cluster), vec![Backend::at(&gone)]].concat();
    watched.cluster.manifests.endpoints(&web(), &with_it).unwrap();
    let at = SocketAddr::new(gone.v4.into(), TARGET).to_string();
    until("the endpoint", PATIENCE, || watched.agent.json(&["services"]).unwrap().to_string().contains(&at));
    watched.connect(3);
    assert_eq!(watched.left_out(), [""; 0], "{}", watched.agent.log());
    assert!(watched.suspicions("alive") > 0.5, "nothing was suspected, so nothing is shown");
    // Control: a hop that really dies is left out.
    watched.cluster.lab.cut(watched.far()).unwrap();
    watched.until(Family::V4, &[format!("next hop {}", watched.far().address(Family::V4))]);
}
