use std::sync::atomic::{AtomicUsize, Ordering};

use traffic_policy_cluster::model::object::{EndpointSlice, SliceEndpoint, SlicePort};
use traffic_policy_cluster::model::{Protocol, ServiceName};

use super::*;

fn hop(last: u8) -> HopAddress {
    HopAddress { link: 2, address: [192, 0, 2, last].into() }
}

fn endpoint(last: u8) -> IpAddr {
    [10, 1, 0, last].into()
}

/// Endpoints by their last octets, with their nodes: none for the empty name.
fn index(endpoints: &[(u8, &str)]) -> Index {
    let endpoints = endpoints.iter().map(|(last, node)| {
        SliceEndpoint::new(endpoint(*last), Some(*node).filter(|node| !node.is_empty()), true)
    });
    let mut index = Index::default();
    index.apply(EndpointSlice {
        name: ServiceName { namespace: "ns".to_owned(), name: "web-1".to_owned() },
        service: "web".to_owned(),
        ports: vec![SlicePort { name: String::new(), protocol: Protocol::Tcp, port: 8080 }],
        endpoints: endpoints.collect(),
        ..EndpointSlice::default()
    });
    index
}

/// Hops whose routes are those of a table, and the number of look-ups.
fn hops(table: &[(u8, u8)]) -> (SilentHops, Arc<AtomicUsize>) {
    let ways: BTreeMap<_, _> = table.iter().map(|(last, by)| (endpoint(*last), hop(*by))).collect();
    let (looks, mut hops) = (Arc::new(AtomicUsize::new(0)), SilentHops::new());
    let counted = Arc::clone(&looks);
    hops.route_by(Arc::new(move |addresses| {
        counted.fetch_add(1, Ordering::Relaxed);
        Ok(ways.clone().into_iter().filter(|(address, _)| addresses.contains(address)).collect())
    }));
    (hops, looks)
}

/// Returns who is suspected once all that was begun has ended.
async fn suspects(hops: &mut SilentHops, index: &Index, now: Instant) -> Vec<String> {
    let mut suspects = BTreeSet::new();
    while let Some(look) = hops.next().await {
        suspects.extend(hops.take(look, now));
        hops.look_again(index, now);
    }
    suspects.iter().map(ToString::to_string).collect()
}

#[tokio::test]
async fn a_neighbour_that_fails_makes_suspect_what_is_behind_it() {
    let index = index(&[(1, "far"), (2, "far"), (3, "near"), (4, "odd"), (5, "")]);
    let (mut hops, looks) = hops(&[(1, 1), (2, 1), (3, 9), (4, 9), (5, 5)]);
    let mut now = Instant::now();
    for (failed, expected) in
        [(7, vec![]), (1, vec!["far"]), (9, vec!["near", "odd"]), (5, vec!["next hop 192.0.2.5"])]
    {
        hops.fail([hop(failed)].into(), &index, now);
        assert_eq!(suspects(&mut hops, &index, now).await, expected, "{failed}");
        now += Duration::from_secs(60);
    }
    assert_eq!(looks.load(Ordering::Relaxed), 4);
}

/// Whoever scans the network makes hundreds of neighbours fail.
#[tokio::test]
async fn neighbours_that_lead_to_no_endpoint_are_not_looked_up_each() {
    let index = index(&[(1, "far")]);
    let (mut hops, looks) = hops(&[(1, 1)]);
    let now = Instant::now();
    for last in 2..200 {
        hops.fail([hop(last)].into(), &index, now);
        assert_eq!(suspects(&mut hops, &index, now).await, [""; 0]);
    }
    assert_eq!(looks.load(Ordering::Relaxed), 1);
    hops.fail([hop(1)].into(), &index, now);
    assert_eq!(suspects(&mut hops, &index, now).await, ["far"]);
    let later = now + KNOWN;
    hops.fail([hop(2)].into(), &index, later);
    assert_eq!(suspects(&mut hops, &index, later).await, [""; 0]);
    assert_eq!(looks.load(Ordering::Relaxed), 3, "endpoints may have come");
}

/// A router with hundreds of nodes behind it would have all of them asked.
#[tokio::test]
async fn few_of_many_nodes_behind_a_router_are_suspected() {
    let names: Vec<_> = (1..=99).map(|last: u8| format!("n{last}")).collect();
    let endpoints: Vec<_> = names.iter().zip(1..).map(|(name, last)| (last, name.as_str())).collect();
    let table: Vec<_> = (1..=99).map(|last| (last, 200)).collect();
    let (index, (mut hops, _)) = (index(&endpoints), hops(&table));
    let now = Instant::now();
    hops.fail([hop(200)].into(), &index, now);
    assert_eq!(suspects(&mut hops, &index, now).await.len(), BEHIND);
}

/// One that fails while routes to other endpoints are looked up is not forgotten.
#[tokio::test]
async fn a_failure_during_a_look_up_is_judged_by_the_next() {
    let index = index(&[(1, "far"), (5, "")]);
    let (mut hops, looks) = hops(&[(1, 1), (5, 5)]);
    let now = Instant::now();
    hops.suspect(hop(5), &index, now);
    hops.fail([hop(1)].into(), &index, now);
    assert_eq!(suspects(&mut hops, &index, now).await, ["far", "next hop 192.0.2.5"]);
    assert_eq!(looks.load(Ordering::Relaxed), 2);
    assert!(hops.get("next hop 192.0.2.5").is_some());
    assert!(!hops.refresh(|name| name == "next hop 192.0.2.5", &index, now));
    assert!(hops.refresh(|_| false, &index, now) && hops.names().count() == 0, "forgotten");
}
