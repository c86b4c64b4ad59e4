//! The controller on a data plane without a kernel: from a folder of manifests to writes and
//! health-check ports.

mod adoption;
mod fake;
mod network;
mod other_layout;
mod running;
mod silent_nodes;
mod sockets;
mod taken_off;

use std::{collections::BTreeSet, fs, net::SocketAddr, path::Path};

use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};
use traffic_policy_cluster::source::Manifests;
use traffic_policy_dataplane::IdleTimes;

use self::{
    fake::Fake,
    running::{Running, settings},
};
use super::*;

const QUICK: Timing = Timing {
    debounce: Duration::from_millis(50),
    sweep: Duration::from_millis(100),
    room: Duration::from_millis(50),
    maintenance: Duration::from_millis(100),
    snat_ports: Duration::from_millis(100),
    retry: Duration::from_millis(50),
};

fn write(folder: &Path, name: &str, policy: &str, port: u16, node: &str) {
    let health = if policy == "Local" { format!("healthCheckNodePort: {port}") } else { String::new() };
    let number: u32 = name.bytes().map(u32::from).sum::<u32>() % 250;
    let text = format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\n\
         spec:\n  type: LoadBalancer\n  clusterIP: 10.96.0.{number}\n  externalTrafficPolicy: {policy}\n  {health}\n  \
         ports: [{{port: 80}}]\n---\n\
         apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\n\
         metadata: {{name: {name}-1, labels: {{kubernetes.io/service-name: {name}}}}}\n\
         ports: [{{port: 8080}}]\nendpoints: [{{addresses: [10.1.0.1], nodeName: {node}}}]\n"
    );
    fs::write(folder.join(format!(".{name}")), text).unwrap();
    fs::rename(folder.join(format!(".{name}")), folder.join(format!("{name}.yaml"))).unwrap();
}

async fn free_port() -> u16 {
    TcpListener::bind("0.0.0.0:0").await.unwrap().local_addr().unwrap().port()
}

async fn status(port: u16) -> Option<u16> {
    let mut stream = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port))).await.ok()?;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    answer.get(9..12)?.parse().ok()
}

/// Waits until a health-check port answers with this status, or not at all.
async fn answers(port: u16, wanted: Option<u16>) {
    let arrived = timeout(Duration::from_secs(20), async {
        while status(port).await != wanted {
            sleep(Duration::from_millis(20)).await;
        }
    });
    assert!(arrived.await.is_ok(), "not {wanted:?} but {:?}", status(port).await);
}

#[tokio::test]
async fn the_health_check_port_follows_the_manifests() {
    let port = free_port().await;
    let running = Running::start(QUICK, |folder, _| write(folder, "web", "Local", port, "here")).await;
    for (policy, node, wanted) in [
        ("Local", "here", Some(200)),
        ("Local", "there", Some(503)),
        ("Local", "here", Some(200)),
        ("Cluster", "here", None),
        ("Local", "here", Some(200)),
    ] {
        write(running.folder.path(), "web", policy, port, node);
        answers(port, wanted).await;
    }
}

#[tokio::test]
async fn no_health_check_port_before_the_maps_are_written() {
    let port = free_port().await;
    let timing = Timing { retry: Duration::from_millis(300), ..QUICK };
    let running = Running::start(timing, |folder, fake| {
        write(folder, "web", "Local", port, "here");
        fake.calls().failing = 2;
    })
    .await;
    running.until("tried", |calls| !calls.syncs.is_empty()).await;
    assert_eq!(status(port).await, None, "nobody may be sent here yet");
    running.until("written", |calls| calls.syncs.len() >= 3).await;
    answers(port, Some(200)).await;
}

/// A port that cannot be listened on is tried again and again, which proves nothing about the
/// content of the maps.
#[tokio::test]
async fn no_health_check_port_promises_what_could_not_be_written() {
    let taken = TcpListener::bind("0.0.0.0:0").await.unwrap();
    let port = free_port().await;
    let running = Running::start(QUICK, |folder, _| {
        write(folder, "web", "Local", port, "there");
        write(folder, "other", "Local", taken.local_addr().unwrap().port(), "here");
    })
    .await;
    answers(port, Some(503)).await;
    let sweeps = {
        let mut calls = running.fake.calls();
        calls.failing = usize::MAX;
        calls.sweeps
    };
    write(running.folder.path(), "web", "Local", port, "here");
    running
        .until("tried, and looked after", |calls| calls.syncs.len() >= 3 && calls.sweeps >= sweeps + 10)
        .await;
    assert_eq!(status(port).await, Some(503));
    running.fake.calls().failing = 0;
    answers(port, Some(200)).await;
}

/// Settings changed by the file or SIGHUP are applied by the loop, and acknowledged after that.
#[tokio::test]
async fn settings_are_taken_over_while_it_runs() {
    let running = Running::start(QUICK, |folder, _| write(folder, "web", "Cluster", 0, "here")).await;
    running.until("synced", |calls| calls.syncs.len() == 1).await;
    let idle = IdleTimes { udp: Duration::from_secs(7), ..IdleTimes::default() };
    for (addresses, syncs) in [("all", 1), ("203.0.113.0/24", 2), ("203.0.113.0/24", 2)] {
        let (reload, done) = Reload::new(Live { idle, node_port_addresses: addresses.parse().unwrap() });
        running.reloads.send(reload).await.unwrap();
        timeout(Duration::from_secs(20), done).await.unwrap().unwrap();
        let calls = running.fake.calls();
        assert_eq!((calls.idle.last(), calls.syncs.len()), (Some(&idle), syncs), "{addresses}");
    }
}

#[tokio::test]
async fn a_failed_write_is_tried_again_with_what_changed() {
    let running = Running::start(QUICK, |folder, _| write(folder, "web", "Cluster", 0, "here")).await;
    running.until("synced", |calls| calls.syncs.len() == 1).await;
    running.fake.calls().failing = 2;
    write(running.folder.path(), "other", "Cluster", 0, "here");
    running.until("tried three times", |calls| calls.syncs.len() >= 4).await;
    for [changed, _] in &running.fake.calls().syncs[1..4] {
        assert_eq!(changed.iter().map(|key| &key.service.name[..]).collect::<Vec<_>>(), ["other"]);
    }
    running.until("healthy", |_| running.health.is_healthy()).await;
}

#[tokio::test]
async fn what_found_no_room_is_tried_again() {
    let running = Running::start(QUICK, |folder, fake| {
        write(folder, "web", "Cluster", 0, "here");
        fake.calls().full = 1;
    })
    .await;
    running.until("tried again", |calls| calls.syncs.len() >= 2).await;
    let calls = running.fake.calls();
    assert_eq!(calls.syncs[1][0].len(), 1);
    assert_eq!(calls.syncs[1][0], calls.syncs[0][1]);
}

/// `status` and health-check port reflect the content of the maps; the node is as healthy as
/// before.
#[tokio::test]
async fn a_service_without_room_is_not_promised() {
    let port = free_port().await;
    let running = Running::start(QUICK, |folder, fake| {
        write(folder, "web", "Local", port, "here");
        fake.calls().full = usize::MAX;
    })
    .await;
    answers(port, Some(503)).await;
    running.until("tried three times", |calls| calls.syncs.len() >= 3).await;
    assert_eq!(status(port).await, Some(503));
    assert!(running.health.is_healthy());
    let report = running.health.report();
    assert!(!report.in_sync, "{report:?}");
    assert!(report.left_out[0].contains("default/web (IPv4): it needs 10 more frontends"), "{report:?}");
    running.fake.calls().full = 0;
    answers(port, Some(200)).await;
    assert_eq!(running.health.report().left_out, [""; 0]);
}

/// While a Service may be missing, no address counts as unallocated.
#[tokio::test]
async fn a_source_that_cannot_see_lets_unknown_cluster_ips_pass() {
    const RANGE: &str = "apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: kubernetes}\n\
                         spec: {cidrs: [10.96.0.0/16]}\n";
    let running = Running::start(QUICK, |folder, _| {
        fs::write(folder.join("range.yaml"), RANGE).unwrap();
        write(folder, "web", "Cluster", 0, "here");
    })
    .await;
    running.until("known", |calls| calls.service_cidrs.len() == 1).await;
    fs::write(running.folder.path().join("broken.yaml"), "kind: [").unwrap();
    running.until("withdrawn", |calls| calls.service_cidrs.is_empty()).await;
    assert_eq!(running.fake.calls().syncs.last().unwrap()[1].len(), 1, "the Service stays");
    fs::remove_file(running.folder.path().join("broken.yaml")).unwrap();
    running.until("known again", |calls| calls.service_cidrs.len() == 1).await;
}

#[tokio::test]
async fn nothing_is_written_before_the_folder_is_there() {
    let running = Running::start(QUICK, |folder, _| fs::remove_dir(folder).unwrap()).await;
    running.until("swept", |calls| calls.sweeps >= 2).await;
    assert!(running.fake.calls().syncs.is_empty());
    assert!(!running.health.is_healthy());
    fs::create_dir(running.folder.path()).unwrap();
    write(running.folder.path(), "web", "Cluster", 0, "here");
    running.until("written", |calls| calls.syncs.iter().any(|[_, desired]| desired.len() == 1)).await;
}

#[tokio::test]
async fn changes_that_come_together_are_written_together() {
    let timing = Timing { debounce: Duration::from_secs(2), ..QUICK };
    let running = Running::start(timing, |folder, _| write(folder, "web", "Cluster", 0, "here")).await;
    running.until("synced", |calls| calls.syncs.len() == 1).await;
    for number in 0..20 {
        write(running.folder.path(), &format!("s{number}"), "Cluster", 0, "here");
        // Each change is noticed by itself: all at once would be one change of the folder.
        sleep(Duration::from_millis(20)).await;
    }
    running.until("whole", |calls| calls.syncs.last().is_some_and(|[_, desired]| desired.len() == 21)).await;
    let syncs = running.fake.calls().syncs.len();
    assert!(syncs <= 3, "{syncs} writes for changes within two seconds");
}

/// The next write waits longer than the debounce after a change of a long list of endpoints; after
/// other changes it does not.
#[tokio::test]
async fn a_write_may_ask_for_time_before_the_next_one() {
    let running = Running::start(QUICK, |folder, fake| {
        write(folder, "web", "Cluster", 0, "here");
        fake.calls().pause = Duration::from_secs(3600);
    })
    .await;
    running.until("synced", |calls| calls.syncs.len() == 1).await;
    let sweeps = running.fake.calls().sweeps;
    write(running.folder.path(), "other", "Cluster", 0, "here");
    running.until("noticed", |_| !running.health.behind().is_zero()).await;
    running.until("swept meanwhile", |calls| calls.sweeps >= sweeps + 3 && calls.pieces == 0).await;
    assert_eq!(running.fake.calls().syncs.len(), 1);
}

#[tokio::test]
async fn a_flow_without_room_is_swept_for_at_once() {
    let timing = Timing { sweep: Duration::from_secs(3600), ..QUICK };
    let running = Running::start(timing, |folder, _| write(folder, "web", "Cluster", 0, "here")).await;
    running.until("source ports looked at", |calls| calls.refreshed >= 1).await;
    assert_eq!(running.fake.calls().sweeps, 0, "there is no reason");
    for sweeps in 1..=2 {
        running.fake.calls().no_room = true;
        running.until("swept whole", |calls| calls.sweeps == sweeps && calls.pieces == 0).await;
    }
}

#[tokio::test]
async fn sweeps_go_on_in_pieces_while_changes_are_gathered() {
    let timing = Timing { debounce: Duration::from_secs(30), sweep: Duration::from_secs(3600), ..QUICK };
    let running = Running::start(timing, |folder, _| write(folder, "web", "Cluster", 0, "here")).await;
    running.until("synced", |calls| calls.syncs.len() == 1).await;
    running.fake.calls().no_room = true;
    running.until("swept whole", |calls| calls.sweeps >= 1 && calls.pieces == 0).await;
    running.until("source ports looked at", |calls| calls.refreshed >= 1).await;
    {
        let mut calls = running.fake.calls();
        (calls.pieces, calls.slow) = (1000, true);
    }
    write(running.folder.path(), "other", "Cluster", 0, "here");
    running.until("noticed", |_| !running.health.behind().is_zero()).await;
    // From here on the write waits for the end of the debounce.
    assert!(running.fake.calls().pieces > 0, "noticed too late to see anything");
    running.until("swept meanwhile", |calls| calls.pieces == 0).await;
    assert_eq!(running.fake.calls().syncs.len(), 1);
}

/// Services whose objects the test writes itself.
struct ByHand {
    services: ServiceSync,
    fake: Fake,
    source: Source,
    _folder: TempDir,
}

impl ByHand {
    fn new(manifests: impl FnOnce(&Path)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        manifests(folder.path());
        let from = Manifests { folder: folder.path().to_owned(), node_name: "here".to_owned() };
        let health = ProxyHealth::new(true, true);
        let metrics = Metrics::new("here".to_owned(), health.clone());
        let mut services = ServiceSync::new(&settings(from.clone()), QUICK.retry, health, metrics);
        services.apply_batch(from.read().unwrap());
        Self { services, fake: Fake::default(), source: from.start(), _folder: folder }
    }

    async fn write(&mut self, addresses: &[node::Address]) -> bool {
        self.services.write(&mut self.fake, addresses, &self.source, &|| ()).await
    }
}

/// The location of an endpoint in its slot depends on whether its address is one of the node's; a
/// VIP may be one or not.
#[tokio::test]
async fn an_address_that_joins_or_leaves_the_node_writes_what_is_at_it() {
    let mut by_hand = ByHand::new(|folder| {
        write(folder, "web", "Cluster", 0, "there");
        let other = "apiVersion: v1\nkind: Service\nmetadata: {name: other}\nspec: {clusterIP: 10.96.0.9, ports: [{port: 80}]}\n";
        fs::write(folder.join("other.yaml"), other).unwrap();
    });
    let address = |text: &str| node::Address { link: 2, address: text.parse().unwrap(), global: true };
    let own = address("192.0.2.1");
    // 10.1.0.1 is an endpoint of web.
    let vip = address("10.1.0.1");
    for addresses in [&[own][..], &[own, vip], &[own, vip], &[own]] {
        by_hand.write(addresses).await;
    }
    let calls = by_hand.fake.calls();
    let changed = |sync: usize| -> BTreeSet<&str> {
        calls.syncs[sync][0].iter().map(|key| key.service.name.as_str()).collect()
    };
    assert_eq!(changed(1), BTreeSet::from(["web"]), "it joined");
    assert!(changed(2).is_empty());
    assert_eq!(changed(3), BTreeSet::from(["web"]), "it left");
}

/// Otherwise each change of the network would cause a rescan and a write, as long as the Service
/// exists.
#[tokio::test]
async fn want_of_room_is_no_failure() {
    let mut by_hand = ByHand::new(|folder| write(folder, "web", "Cluster", 0, "here"));
    by_hand.fake.calls().full = 1;
    assert!(!by_hand.write(&[]).await);
    assert!(by_hand.services.lacks_room());
    by_hand.write(&[]).await;
    assert!(!by_hand.services.lacks_room());
    by_hand.fake.calls().failing = 1;
    assert!(by_hand.write(&[]).await);
}
