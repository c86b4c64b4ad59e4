//! Silent nodes: from a suspicion of the packet path to the maps, probes and metrics, and back.

use std::{net::IpAddr, sync::Arc};

use traffic_policy_dataplane::{
    NodeSilence, Suspect,
    node::{Answer, HopAddress, Question, Sign},
};

use super::{
    super::{silent_hops::Ways, silent_nodes::Ask},
    *,
};

impl Fake {
    /// Returns a way to ask nodes, by their endpoints, and the gateway, which has none.
    pub fn ask(&self) -> Ask {
        let fake = self.clone();
        Arc::new(move |question: Question| {
            let calls = fake.calls();
            let silent = match question.endpoints.as_slice() {
                [] => !calls.gateway,
                endpoints => endpoints.iter().all(|(address, _)| calls.silent.contains(&address.ip())),
            };
            let sign = Sign::Echo(IpAddr::from([192, 0, 2, 1]));
            let answer = if silent { Answer::Silent(vec![sign]) } else { Answer::Alive(sign) };
            Box::pin(async { answer })
        })
    }

    pub fn ways(&self) -> Ways {
        let fake = self.clone();
        Arc::new(move |addresses| {
            let ways = fake.calls().ways.clone();
            Ok(ways.into_iter().filter(|(address, _)| addresses.contains(address)).collect())
        })
    }
}

impl NodeSilence for Fake {
    async fn suspected(&mut self) -> Suspect {
        loop {
            let next = self.calls().suspicions.pop_front();
            if let Some(suspect) = next {
                return suspect;
            }
            // The test adds a suspicion; nothing else tells this task.
            sleep(Duration::from_millis(5)).await;
        }
    }

    fn suspect_after(&mut self, syns: u32) {
        self.calls().suspect_syns = syns;
    }

    fn suspect_again(&mut self, suspect: &Suspect) {
        self.calls().suspected_again.push(suspect.to_string());
    }

    fn set_dead(&mut self, suspect: &Suspect, dead: bool) {
        self.calls().dead.push((suspect.to_string(), dead));
    }

    fn node_numbers(&self) -> Vec<(u16, String)> {
        self.calls().numbered.clone()
    }

    fn number_nodes(&mut self, nodes: Vec<(u16, String)>) -> Result<()> {
        self.calls().numbered.extend(nodes);
        Ok(())
    }
}

fn node(name: &str) -> Suspect {
    Suspect::Node(name.to_owned())
}

/// The nodes with their endpoints' addresses.
const NODES: [(&str, [u8; 4]); 4] =
    [("here", [10, 1, 0, 1]), ("far", [10, 1, 1, 1]), ("near", [10, 1, 2, 1]), ("odd", [10, 1, 3, 1])];

fn address(node: &str) -> IpAddr {
    NODES.iter().find(|(name, _)| *name == node).map(|(_, address)| IpAddr::from(*address)).unwrap()
}

async fn running() -> Running {
    without_names(&[]).await
}

/// The endpoints of some nodes do not name them.
async fn without_names(nameless: &'static [&'static str]) -> Running {
    let running = Running::start(QUICK, |folder, fake| {
        let endpoints = NODES.map(|(node, _)| match nameless.contains(&node) {
            true => format!("{{addresses: [{}]}}", address(node)),
            false => format!("{{addresses: [{}], nodeName: {node}}}", address(node)),
        });
        let text = format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: web}}\n\
             spec: {{clusterIP: 10.96.0.1, ports: [{{port: 80}}]}}\n---\n\
             apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\n\
             metadata: {{name: web-1, labels: {{kubernetes.io/service-name: web}}}}\n\
             ports: [{{port: 8080}}]\nendpoints: [{}]\n---\n\
             apiVersion: v1\nkind: Node\nmetadata: {{name: here}}\n",
            endpoints.join(", ")
        );
        fs::write(folder.join("web.yaml"), text).unwrap();
        fake.calls().gateway = true;
    })
    .await;
    running.until("synced", |asked| lists(asked, &["here", "far", "near", "odd"])).await;
    running
}

/// Whether new flows go to the endpoints of exactly these nodes.
fn lists(asked: &fake::Calls, nodes: &[&str]) -> bool {
    let listed = asked.listed.get("web").into_iter().flatten().map(SocketAddr::ip);
    listed.collect::<BTreeSet<_>>() == nodes.iter().map(|node| address(node)).collect()
}

fn metric(running: &Running, name: &str) -> String {
    let text = running.metrics.render();
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("no {name}: {text}")).to_owned()
}

#[tokio::test]
async fn a_dead_node_is_left_out_until_it_answers() {
    let running = running().await;
    running.fake.calls().suspicions.push_back(node("far"));
    let wrong = "traffic_policy_node_suspicions_total{result=\"alive\"}";
    running.until("cleared", |_| metric(&running, wrong) == "1").await;
    running.fake.calls().silent.insert(address("far"));
    running.fake.calls().suspicions.push_back(node("far"));
    running.until("left out", |asked| lists(asked, &["here", "near", "odd"])).await;
    assert_eq!(running.fake.calls().dead, [("far".to_owned(), true)]);
    let report = running.health.report();
    assert_eq!(report.nodes_left_out["far"].asked, "ping of 192.0.2.1");
    assert_eq!((report.in_sync, report.cut_off, running.health.is_healthy()), (true, false, true));
    assert_eq!(metric(&running, "traffic_policy_nodes_left_out"), "1");
    assert_eq!(metric(&running, "traffic_policy_node_suspicions_total{result=\"dead\"}"), "1");
    running.fake.calls().silent.clear();
    running.until("back", |asked| lists(asked, &["here", "far", "near", "odd"])).await;
    assert_eq!(running.fake.calls().dead.last(), Some(&("far".to_owned(), false)));
    running.until("forgotten", |_| running.health.report().nodes_left_out.is_empty()).await;
    assert_eq!(metric(&running, "traffic_policy_nodes_left_out"), "0");
}

#[tokio::test]
async fn a_node_that_hears_nobody_says_503_and_leaves_out_nobody() {
    let running = running().await;
    {
        let mut asked = running.fake.calls();
        asked.silent = ["far", "near", "odd"].map(address).into();
        asked.gateway = false;
        asked.suspicions.push_back(node("near"));
    }
    running.until("cut off", |_| running.health.report().cut_off).await;
    assert!(!running.health.is_healthy());
    assert!(lists(&running.fake.calls(), &["here", "far", "near", "odd"]));
    running.fake.calls().silent.clear();
    running.until("back", |_| running.health.is_healthy()).await;
    assert_eq!(running.fake.calls().dead, []);
}

/// A node that answers may have an endpoint that does not; a node without known endpoints is not
/// judged yet.
#[tokio::test]
async fn a_node_that_was_not_found_dead_may_be_suspected_again() {
    let running = running().await;
    running.fake.calls().suspicions.extend([node("far"), node("unknown")]);
    let again = |calls: &fake::Calls| calls.suspected_again.iter().cloned().collect::<BTreeSet<_>>();
    let both = BTreeSet::from(["far".to_owned(), "unknown".to_owned()]);
    running.until("both again", |calls| again(calls) == both).await;
    assert_eq!(running.fake.calls().dead, []);
}

/// The endpoint of `far` is reached by a hop of its own, two others by one router.
#[tokio::test]
async fn a_silent_next_hop_stands_for_the_node_that_its_endpoints_do_not_name() {
    let running = without_names(&["far", "near", "odd"]).await;
    let hop = |last: u8| HopAddress { link: 2, address: IpAddr::from([192, 0, 2, last]) };
    let (own, router) = (Suspect::Hop(hop(1)), Suspect::Hop(hop(9)));
    {
        let mut asked = running.fake.calls();
        asked.ways =
            [("far", hop(1)), ("near", hop(9)), ("odd", hop(9))].map(|(n, h)| (address(n), h)).into();
        asked.silent = [address("far"), address("near")].into();
        // One endpoint behind it answers, so the router lives.
        asked.suspicions.push_back(router.clone());
    }
    running.until("cleared", |asked| asked.suspected_again == [router.to_string()]).await;
    assert!(lists(&running.fake.calls(), &["here", "far", "near", "odd"]));
    running.fake.calls().suspicions.push_back(own.clone());
    running.until("left out", |asked| lists(asked, &["here", "near", "odd"])).await;
    assert_eq!(running.fake.calls().dead, [("next hop 192.0.2.1".to_owned(), true)]);
    assert!(running.health.report().nodes_left_out.contains_key("next hop 192.0.2.1"));
    // Now another hop leads there: nothing is behind the dead one.
    running.fake.calls().ways.insert(address("far"), hop(9));
    running.until("routed elsewhere", |asked| lists(asked, &["here", "far", "near", "odd"])).await;
    assert_eq!(running.fake.calls().dead.last(), Some(&(own.to_string(), false)));
    running.until("forgotten", |_| running.health.report().nodes_left_out.is_empty()).await;
}

/// The router and all behind it are silent: none but it is left out, and the last endpoint stays.
#[tokio::test]
async fn all_behind_a_dead_router_are_left_out_together() {
    let running = without_names(&["far", "near"]).await;
    let router = HopAddress { link: 2, address: IpAddr::from([192, 0, 2, 9]) };
    {
        let mut asked = running.fake.calls();
        asked.ways = ["far", "near"].map(|node| (address(node), router)).into();
        asked.silent = asked.ways.keys().copied().collect();
        asked.suspicions.push_back(Suspect::Hop(router));
    }
    running.until("left out", |asked| lists(asked, &["here", "odd"])).await;
    running.fake.calls().silent.clear();
    running.until("back", |asked| lists(asked, &["here", "far", "near", "odd"])).await;
}
