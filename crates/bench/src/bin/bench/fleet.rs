//! Requests of a fleet of nodes to an API server: the watching clients of 200 agents, with the
//! agent's own code, against the API server of the tests, in one process.
//!
//! Connections, requests and bytes are counted by the server, TLS included. They are numbers of
//! messages, and so the same on any machine, except for the busiest second after an outage, which
//! depends on the machine and on chance.

mod nodes;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tokio::{runtime::Runtime, time::sleep};
use traffic_policy_testing::api_server::{ApiServer, Certificate, Kind, Streaming, Traffic};

use self::nodes::Nodes;
use super::{
    Effort,
    report::{Goal, Report, Row, Unit},
};

/// Number of nodes that follow the API server.
const NODES: u32 = 200;
/// Number of nodes for which figures are computed.
const LARGE: u32 = 5_000;
/// Number of Services, each with an EndpointSlice of [`ENDPOINTS`]; it is small, as one machine is
/// both the fleet and its server.
const SERVICES: u32 = 20;
/// Number of Services where the bytes of lists are counted, as a shorter list would not be
/// compressed; [`LISTING_NODES`] is the number of nodes that list them.
const LISTED: u32 = 200;
const LISTING_NODES: u32 = 5;
const ENDPOINTS: u32 = 10;
/// Number of edits that a tenant makes.
const EDITS: u32 = 50;
const QUIET: Duration = Duration::from_secs(60);
const GROUP: &str = "fleet, 200 nodes";

const CONNECTIONS: &str = "connections, a node";
const START_REQUESTS: &str = "requests until all is listed, a node";
const START_STREAMED: &str = "bytes until all is listed, streaming lists, a node and Service";
const START_LISTED: &str = "bytes until all is listed, lists and gzip, a node and Service";
const QUIET_REQUESTS: &str = "requests in 60 s in which nothing happens, a node";
const QUIET_BYTES: &str = "bytes in 60 s in which nothing happens, a node";
const CHANGE_BYTES: &str = "bytes of one endpoint's change, a node";
const OUTAGE_LISTS: &str = "lists after an outage beyond compaction, a node";
const OUTAGE_ETCD: &str = "of these from etcd";
const OUTAGE_CONNECTIONS: &str = "connections after it, a node";
const OUTAGE_BUSIEST: &str = "lists in the busiest second after it, of 5,000 nodes (computed)";
const ROLLING_REQUESTS: &str = "requests of a rolling update of all agents, a node";
const ROLLING_CONNECTIONS: &str = "connections of a rolling update, a node";
const EDIT_EVENTS: &str = "Events for 50 edits of an invalid annotation, a node";
const EDIT_LISTS: &str = "lists for these edits, a node";
const EDIT_WATCHES: &str = "watches begun for these edits, a node";
const EDIT_CONNECTIONS: &str = "connections for these edits, a node";
const EDIT_REQUESTS: &str = "requests for these edits, of 5,000 nodes (computed)";

const ROWS: [&str; 18] = [
    CONNECTIONS,
    START_REQUESTS,
    START_STREAMED,
    START_LISTED,
    QUIET_REQUESTS,
    QUIET_BYTES,
    CHANGE_BYTES,
    OUTAGE_LISTS,
    OUTAGE_ETCD,
    OUTAGE_CONNECTIONS,
    OUTAGE_BUSIEST,
    ROLLING_REQUESTS,
    ROLLING_CONNECTIONS,
    EDIT_EVENTS,
    EDIT_LISTS,
    EDIT_WATCHES,
    EDIT_CONNECTIONS,
    EDIT_REQUESTS,
];

pub(crate) fn measure(_effort: Effort, report: &mut Report) -> Result<()> {
    // Every row is queried, because the report must know all of them: hence `count`, not `any`.
    let wanted = ROWS.iter().filter(|row| report.wants(GROUP, row)).count();
    if wanted == 0 {
        return Ok(());
    }
    let mut figures = Figures::default();
    Runtime::new()?.block_on(fleet(&mut figures))?;
    for row in ROWS {
        let (_, unit, figure, goal) = figures
            .0
            .iter()
            .find(|(name, ..)| *name == row)
            .with_context(|| format!("{row:?} was not measured"))?;
        if report.wants(GROUP, row) {
            let row = Row::new(GROUP, row, *unit, &[*figure]);
            report.add(goal.map_or(row.clone(), |goal| row.goal(goal)));
        }
    }
    Ok(())
}

/// Name, unit, figure, goal.
#[derive(Default)]
struct Figures(Vec<(&'static str, Unit, f64, Option<Goal>)>);

impl Figures {
    fn add(&mut self, name: &'static str, unit: Unit, figure: f64) {
        self.0.push((name, unit, figure, None));
    }

    fn at_most(&mut self, name: &'static str, unit: Unit, figure: f64, most: f64) {
        self.0.push((name, unit, figure, Some(Goal::AtMost(most))));
    }
}

fn per_node(count: u64) -> f64 {
    count as f64 / f64::from(NODES)
}

/// Requests, connections and bytes between two readings of the server's counters.
struct Span<'a> {
    server: &'a ApiServer,
    before: Traffic,
    requests: usize,
}

impl<'a> Span<'a> {
    fn begin(server: &'a ApiServer) -> Self {
        Self { server, before: server.traffic(), requests: server.requests().len() }
    }

    fn connections(&self) -> u64 {
        self.server.traffic().connections - self.before.connections
    }

    fn bytes(&self) -> u64 {
        let now = self.server.traffic();
        now.sent - self.before.sent + now.received - self.before.received
    }

    /// Returns the times of requests that contain each of these texts in their method, path and
    /// query.
    fn requests(&self, texts: &[&str]) -> Vec<Instant> {
        let requests = self.server.requests().into_iter().skip(self.requests);
        let found = requests.filter(|(_, request)| texts.iter().all(|text| request.contains(text)));
        found.map(|(when, _)| when).collect()
    }

    fn count(&self, texts: &[&str]) -> u64 {
        self.requests(texts).len() as u64
    }
}

fn name(number: u32) -> String {
    format!("service-{number:05}")
}

fn service(number: u32, annotations: &Value) -> Value {
    let [_, _, high, low] = number.to_be_bytes();
    json!({
        "kind": "Service", "apiVersion": "v1",
        "metadata": {"name": name(number), "namespace": "fleet", "annotations": annotations},
        "spec": {
            "type": "ClusterIP", "clusterIP": format!("10.96.{high}.{low}"), "clusterIPs": [format!("10.96.{high}.{low}")],
            "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack", "internalTrafficPolicy": "Cluster",
            "sessionAffinity": "None", "selector": {"app": name(number)},
            "ports": [{"name": "http", "port": 80, "targetPort": 8080, "protocol": "TCP"}],
        },
        "status": {"loadBalancer": {}},
    })
}

/// Returns the EndpointSlice of a Service as the controller writes it; `shift` selects other
/// addresses.
fn slice(number: u32, shift: u32) -> Value {
    let endpoints: Vec<_> = (0..ENDPOINTS)
        .map(|i| {
            let [_, _, high, low] = (number * ENDPOINTS + i).to_be_bytes();
            json!({
                "addresses": [format!("10.{}.{high}.{low}", 128 + shift)], "nodeName": format!("node-{i}"), "zone": "zone-a",
                "conditions": {"ready": true, "serving": true, "terminating": false},
                "targetRef": {
                    "kind": "Pod", "namespace": "fleet", "name": format!("{}-6d4b75cb6d-{i:05}", name(number)),
                    "uid": format!("7f2b54f4-38d7-4d0f-9d4c-{number:06}{i:06}"),
                },
            })
        })
        .collect();
    json!({
        "kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1",
        "metadata": {
            "name": format!("{}-abcde", name(number)), "namespace": "fleet", "generateName": format!("{}-", name(number)),
            "labels": {
                "kubernetes.io/service-name": name(number),
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
            },
        },
        "addressType": "IPv4", "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}], "endpoints": endpoints,
    })
}

async fn fleet(figures: &mut Figures) -> Result<()> {
    listed(figures).await?;
    let mut server = serve(SERVICES)?;
    let mut nodes = started(&server, figures).await?;
    quiet(&server, figures).await?;
    change(&server, &nodes, figures).await?;
    tenant(&server, &nodes, figures).await?;
    outage(&mut server, &nodes, figures).await?;
    rolling(&server, &mut nodes, figures).await
}

fn serve(services: u32) -> Result<ApiServer> {
    let server = ApiServer::start_tls(Certificate::for_name("kubernetes.default.svc")?)?;
    for number in 0..services {
        server.put(service(number, &json!({})))?;
        server.put(slice(number, 0))?;
    }
    // Objects change from here on.
    server.compact();
    Ok(server)
}

/// Measures the bytes of both forms of lists.
async fn listed(figures: &mut Figures) -> Result<()> {
    for (streaming, row) in [(Streaming::Refused, START_LISTED), (Streaming::Given, START_STREAMED)] {
        let server = serve(LISTED)?;
        server.stream_lists(streaming);
        let span = Span::begin(&server);
        let _nodes = Nodes::start(&server, LISTING_NODES).await?;
        let lists = u64::from(LISTING_NODES) * u64::from(streaming == Streaming::Refused);
        let compressed = server.traffic().compressed;
        ensure!(compressed >= lists, "of {lists} lists of EndpointSlices {compressed} were compressed");
        figures.add(row, Unit::Bytes, span.bytes() as f64 / f64::from(LISTED * LISTING_NODES));
    }
    Ok(())
}

/// Starts all nodes.
async fn started(server: &ApiServer, figures: &mut Figures) -> Result<Nodes> {
    let span = Span::begin(server);
    let nodes = Nodes::start(server, NODES).await?;
    figures.at_most(CONNECTIONS, Unit::Count, per_node(span.connections()), 1.0);
    figures.add(START_REQUESTS, Unit::Count, per_node(span.count(&[])));
    Ok(nodes)
}

async fn quiet(server: &ApiServer, figures: &mut Figures) -> Result<()> {
    let span = Span::begin(server);
    // The figure covers this time, in which nothing changes.
    sleep(QUIET).await;
    figures.at_most(QUIET_REQUESTS, Unit::Count, per_node(span.count(&[])), 0.0);
    figures.add(QUIET_BYTES, Unit::Bytes, per_node(span.bytes()));
    Ok(())
}

async fn change(server: &ApiServer, nodes: &Nodes, figures: &mut Figures) -> Result<()> {
    const CHANGES: u32 = 10;
    let span = Span::begin(server);
    for number in 0..CHANGES {
        server.put(slice(number, 1))?;
    }
    nodes.wait("the changes are there", |node| node.moved == CHANGES).await?;
    figures.add(CHANGE_BYTES, Unit::Bytes, per_node(span.bytes()) / f64::from(CHANGES));
    Ok(())
}

/// Rewrites an annotation as a tenant would; each value is invalid.
async fn tenant(server: &ApiServer, nodes: &Nodes, figures: &mut Figures) -> Result<()> {
    let span = Span::begin(server);
    for edit in 0..EDITS {
        server.put(service(0, &json!({"traffic-policy.io/drain": format!("never {edit}")})))?;
        let said = format!("never {edit}\"");
        nodes.wait("the edit is there", |node| node.warnings.iter().any(|text| text.contains(&said))).await?;
    }
    // A node does not report when it has posted an Event: those under way get this time.
    sleep(Duration::from_secs(2)).await;
    let (events, all) = (span.count(&["/events"]), span.count(&[]));
    ensure!(events >= u64::from(NODES), "{events} Events of {NODES} nodes: not each has told of the edits");
    figures.at_most(EDIT_EVENTS, Unit::Count, per_node(events), 1.0);
    // Any read that is not a watch counts.
    let watches = span.count(&["GET", "watch=true"]);
    figures.at_most(EDIT_LISTS, Unit::Count, per_node(span.count(&["GET"]) - watches), 0.0);
    figures.at_most(EDIT_WATCHES, Unit::Count, per_node(watches), 0.0);
    figures.at_most(EDIT_CONNECTIONS, Unit::Count, per_node(span.connections()), 0.0);
    figures.at_most(EDIT_REQUESTS, Unit::Count, per_node(all) * f64::from(LARGE), f64::from(LARGE));
    // Agents that start would cause requests, too.
    server.put(service(0, &json!({})))?;
    nodes.wait("the annotation is gone", |node| node.warnings.is_empty()).await
}

async fn outage(server: &mut ApiServer, nodes: &Nodes, figures: &mut Figures) -> Result<()> {
    server.stop().await;
    for number in 0..SERVICES {
        server.put(slice(number, 2))?;
    }
    server.compact();
    server.restart().await?;
    let server = &*server;
    let span = Span::begin(server);
    nodes.wait("the new state is there", |node| node.moved_twice == SERVICES).await?;
    // The other kinds are listed anew, too, each within 30 s of the outage's end, and nodes do not
    // report when. The slowest of all nodes has its slices by now, at nearly 30 s.
    sleep(Duration::from_secs(5)).await;
    let pages = span.count(&["limit="]);
    let cached = span.requests(&["resourceVersionMatch=NotOlderThan"]);
    let lists = pages + cached.len() as u64;
    ensure!(
        lists >= u64::from(NODES),
        "{lists} lists of {NODES} nodes: the outage was not beyond compaction"
    );
    figures.add(OUTAGE_LISTS, Unit::Count, per_node(lists));
    figures.at_most(OUTAGE_ETCD, Unit::Count, per_node(pages), 0.0);
    figures.add(OUTAGE_CONNECTIONS, Unit::Count, per_node(span.connections()));
    let busiest = cached.iter().map(|begin| within(&cached, *begin, Duration::from_secs(1))).max();
    let busiest = busiest.context("no list came from the cache")?;
    figures.add(OUTAGE_BUSIEST, Unit::Count, f64::from(LARGE / NODES) * busiest as f64);
    Ok(())
}

fn within(times: &[Instant], begin: Instant, length: Duration) -> usize {
    times.iter().filter(|time| **time >= begin && **time < begin + length).count()
}

/// Stops and starts each agent, one after the other.
async fn rolling(server: &ApiServer, nodes: &mut Nodes, figures: &mut Figures) -> Result<()> {
    let (span, listed) = (Span::begin(server), server.lists_of(Kind::Service));
    nodes.replace_each(server, |node| node.moved_twice == SERVICES).await?;
    figures.add(ROLLING_REQUESTS, Unit::Count, per_node(span.count(&[])));
    figures.at_most(ROLLING_CONNECTIONS, Unit::Count, per_node(span.connections()), 1.0);
    // Agents that list nothing would have the best figures.
    let listed = server.lists_of(Kind::Service) - listed;
    ensure!(listed >= NODES as usize, "{listed} lists of Services by {NODES} new agents");
    Ok(())
}
