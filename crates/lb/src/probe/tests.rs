//! The comparison as a table: the expected answer, the actual one, and the conclusion.

use std::time::Duration;

use traffic_policy_cluster::{
    model::{Index, ServiceName},
    source,
};

use super::{
    super::{Answer, Cluster, Judge, Overrides, Question, by_name},
    Asking, Cause, Heard, Http, NodeAddress, Probed, Questions, Scope,
};

const SERVICE: Question = Question::ServiceHealth(32080);
const PROXY: Question = Question::ProxyHealth;
const TRAFFIC: Question = Question::TrafficPort(30080);

const EXCELLENT: Answer = Answer::Ok(None);
const TWO: Answer = Answer::Ok(Some(2));
const NONE: Answer = Answer::Unavailable;

fn web() -> ServiceName {
    ServiceName { namespace: "shop".to_owned(), name: "web".to_owned() }
}

fn asking(node: &str, question: Question, expected: Answer) -> Asking {
    Asking {
        node: node.to_owned(),
        service: (question != PROXY).then(web),
        question,
        to: Some("192.0.2.1:1".parse().unwrap()),
        expected,
        kubelet_silent: false,
        decides: true,
    }
}

/// Parses `200 BODY`, `200 weight=2 BODY`, or a word.
fn heard(question: Question, text: &str) -> Heard {
    match text {
        "connected" => return Heard::Connected,
        "refused" => return Heard::Refused,
        "silence" => return Heard::Silence,
        "hangs" => return Heard::Hangs,
        "unreachable" => return Heard::Unreachable,
        "garbled" => return Heard::Garbled("other bytes"),
        "no-address" => return Heard::NoAddress,
        "not-asked" => return Heard::NotAsked("no file is left".to_owned()),
        _ => {}
    }
    let (status, body) = text.split_once(' ').unwrap();
    let (weight, body) = match body.strip_prefix("weight=") {
        Some(rest) => rest.split_once(' ').map(|(weight, body)| (Some(weight.as_bytes()), body)).unwrap(),
        None => (None, body),
    };
    let body = match body.split_once(':') {
        Some((name, rest)) if !body.starts_with('{') => {
            let (count, healthy) = rest.split_once(':').unwrap_or((rest, "true"));
            let healthy =
                if healthy == "-" { String::new() } else { format!(",\"serviceProxyHealthy\":{healthy}") };
            format!(
                "{{\"service\":{{\"namespace\":\"shop\",\"name\":{name:?}}},\"localEndpoints\":{count}{healthy}}}"
            )
        }
        _ => body.to_owned(),
    };
    Heard::Http(Http::read(question, status.parse().unwrap(), weight, body.as_bytes()))
}

const WELL: &str = r#"200 {"lastUpdated":"t","currentTime":"t","nodeEligible":true,"healthy":true}"#;
const LEAVING: &str = r#"503 {"lastUpdated":"t","currentTime":"t","nodeEligible":false,"healthy":true}"#;
const UNHEALTHY: &str = r#"503 {"lastUpdated":"t","currentTime":"t","nodeEligible":true,"healthy":false}"#;

const ODD: &str =
    r#"503 {"lastUpdated":"t","currentTime":"t","nodeEligible":true,"cutOff":"no","leftOut":7}"#;
const CUT_OFF: &str = r#"503 {"lastUpdated":"t","currentTime":"t","nodeEligible":true,"healthy":true,"cutOff":true,"leftOut":[]}"#;

/// The answers of an agent that has news of its node's end, which these objects do not have.
const GOING: &str = r#"503 {"lastUpdated":"t","currentTime":"t","nodeEligible":false,"healthy":true,"leaving":{"reason":"gce: preempted","goneBy":"2026-11-24T13:00:30Z"}}"#;
const GOING_TOO: &str = r#"503 weight=2 {"service":{"namespace":"shop","name":"web"},"localEndpoints":2,"serviceProxyHealthy":true,"nodeLeaving":"gce: preempted"}"#;
/// The word without a reason is not the agent's.
const NOT_GOING: &str =
    r#"503 {"lastUpdated":"t","currentTime":"t","nodeEligible":false,"healthy":true,"leaving":true}"#;

/// The cases of one node: the answer of its /healthz (empty: not probed), the probe, the expected
/// answer, the actual one, and the finding.
const CASES: &[(&str, Question, Answer, &str, &str)] = &[
    // The answers are as expected.
    (WELL, SERVICE, TWO, "200 weight=2 web:2", ""),
    (WELL, SERVICE, NONE, "503 weight=0 web:0", ""),
    (WELL, TRAFFIC, Answer::Open, "connected", ""),
    (WELL, TRAFFIC, Answer::Silence, "silence", ""),
    (WELL, TRAFFIC, Answer::Refused, "refused", ""),
    ("", PROXY, EXCELLENT, WELL, ""),
    ("", PROXY, NONE, LEAVING, ""),
    // The proxy has other objects.
    (WELL, SERVICE, TWO, "503 weight=0 web:0", "error stale-proxy"),
    (WELL, SERVICE, NONE, "200 weight=1 web:1", "error stale-proxy"),
    (WELL, SERVICE, TWO, "200 weight=3 web:3", "warning stale-proxy"),
    (WELL, TRAFFIC, Answer::Silence, "connected", "warning stale-proxy"),
    (WELL, TRAFFIC, Answer::Refused, "connected", "warning stale-proxy"),
    ("", PROXY, EXCELLENT, LEAVING, "error stale-proxy"),
    ("", PROXY, NONE, WELL, "error stale-proxy"),
    // The proxy itself reports that it is unhealthy.
    (UNHEALTHY, SERVICE, TWO, "503 weight=2 web:2:false", "error unhealthy-proxy"),
    (UNHEALTHY, SERVICE, NONE, "503 weight=0 web:0:false", "warning unhealthy-proxy"),
    ("", PROXY, EXCELLENT, UNHEALTHY, "error unhealthy-proxy"),
    ("", PROXY, EXCELLENT, "503 {\"lastUpdated\":\"t\",\"currentTime\":\"t\"}", "error unhealthy-proxy"),
    // It is about to go, and says so on purpose; an endpoint that is missing is another matter.
    ("", PROXY, EXCELLENT, GOING, "warning leaving"),
    ("", PROXY, NONE, GOING, ""),
    (GOING, SERVICE, TWO, GOING_TOO, "warning leaving"),
    (WELL, SERVICE, TWO, GOING_TOO, "warning leaving"),
    (GOING, SERVICE, NONE, GOING_TOO, "warning stale-proxy"),
    ("", PROXY, EXCELLENT, NOT_GOING, "error stale-proxy"),
    // It hears no other node; its other health ports need not say why.
    ("", PROXY, EXCELLENT, CUT_OFF, "error cut-off"),
    ("", PROXY, NONE, CUT_OFF, ""),
    (CUT_OFF, SERVICE, TWO, "503 weight=2 web:2", "error cut-off"),
    (CUT_OFF, SERVICE, TWO, "503 weight=2 web:2:false", "error cut-off"),
    (CUT_OFF, SERVICE, NONE, "503 weight=0 web:0", ""),
    // Fields of the same name with another meaning, or none, are passed over.
    ("", PROXY, EXCELLENT, ODD, "error unhealthy-proxy"),
    // A firewall drops the packets, or no host has the address.
    (WELL, SERVICE, TWO, "silence", "error firewall"),
    (WELL, SERVICE, NONE, "silence", "warning firewall"),
    ("silence", SERVICE, TWO, "silence", "error firewall"),
    (WELL, TRAFFIC, Answer::Open, "silence", "error firewall"),
    (WELL, TRAFFIC, Answer::Refused, "silence", "note firewall"),
    ("", PROXY, EXCELLENT, "silence", "error firewall"),
    // No proxy answers on the node.
    ("refused", SERVICE, TWO, "refused", "error dead-agent"),
    ("refused", SERVICE, NONE, "refused", "error dead-agent"),
    ("refused", TRAFFIC, Answer::Open, "refused", "error dead-agent"),
    ("", PROXY, EXCELLENT, "refused", "error dead-agent"),
    (WELL, SERVICE, TWO, "refused", "error nothing-listens"),
    (WELL, SERVICE, NONE, "refused", "warning nothing-listens"),
    (WELL, TRAFFIC, Answer::Open, "refused", "error nothing-listens"),
    (WELL, TRAFFIC, Answer::Silence, "refused", "warning nothing-listens"),
    // The packet path outlives an agent: what follows from the objects still holds for it.
    ("refused", TRAFFIC, Answer::Open, "connected", ""),
    // The address is not the node's.
    (WELL, SERVICE, TWO, "unreachable", "error wrong-address"),
    (WELL, SERVICE, NONE, "unreachable", "warning wrong-address"),
    (WELL, TRAFFIC, Answer::Silence, "unreachable", "warning wrong-address"),
    (WELL, SERVICE, TWO, "200 weight=2 other:2", "error other-service"),
    (WELL, SERVICE, TWO, "no-address", "warning no-address"),
    (WELL, SERVICE, TWO, "not-asked", "warning not-asked"),
    // Another program answers.
    (WELL, SERVICE, TWO, "hangs", "error hangs"),
    (WELL, SERVICE, NONE, "hangs", "warning hangs"),
    (WELL, SERVICE, TWO, "garbled", "error other-proxy"),
    (WELL, SERVICE, TWO, "200 weight=2 web:2:-", "note other-proxy"),
    (WELL, SERVICE, TWO, "200 web:2", "note other-proxy"),
    (WELL, SERVICE, TWO, "200 weight=1 web:2", "note other-proxy"),
    (WELL, SERVICE, TWO, "200 ok", "note other-proxy"),
    (WELL, SERVICE, NONE, "200 ok", "error other-proxy"),
    (WELL, SERVICE, TWO, "302 ", "error other-proxy"),
    (WELL, SERVICE, TWO, "404 weight=2 web:2", "error other-proxy"),
    // A text that is not a valid name is not printed.
    (WELL, SERVICE, TWO, "200 weight=2 \u{1b}[2J:2", "note other-proxy"),
    ("", PROXY, EXCELLENT, "200 ok", "note other-proxy"),
    ("", PROXY, EXCELLENT, "200 {\"lastUpdated\":\"t\",\"currentTime\":\"t\"}", "note other-proxy"),
    ("", PROXY, NONE, "200 {\"lastUpdated\":\"t\",\"currentTime\":\"t\"}", "warning other-proxy"),
    ("", PROXY, EXCELLENT, "404 ", "error other-proxy"),
];

fn codes(probed: &Probed, service: Option<&ServiceName>) -> Vec<String> {
    let findings = probed.findings(service).into_iter();
    findings.map(|finding| format!("{} {}", finding.level.name(), finding.code)).collect()
}

#[test]
fn what_an_answer_tells() {
    let mut told = std::collections::BTreeSet::new();
    for (healthz, question, expected, answer, wanted) in CASES {
        let took = Duration::from_millis(1);
        let mut all = vec![(asking("n1", *question, *expected), heard(*question, answer), took)];
        if !healthz.is_empty() {
            all.insert(0, (asking("n1", PROXY, EXCELLENT), heard(PROXY, healthz), took));
        }
        let probed = Probed::new(all);
        let service = web();
        let found = codes(&probed, (*question != PROXY).then_some(&service));
        let wanted: Vec<_> = Some(*wanted).filter(|wanted| !wanted.is_empty()).into_iter().collect();
        assert_eq!(found, wanted, "{healthz} {question:?} {expected:?} {answer}");
        told.extend(probed.answered.iter().filter_map(|one| one.difference).map(|one| one.cause));
        for finding in probed.findings(None).iter().chain(&probed.findings(Some(&service))) {
            assert!(!finding.fix.is_empty() && finding.what.contains("n1"), "{finding:?}");
            assert!(!finding.what.contains('\u{1b}'), "{finding:?}");
        }
    }
    let missing: Vec<_> =
        Cause::ALL.iter().filter(|cause| !told.contains(cause) && **cause != Cause::KubeletOnly).collect();
    assert!(missing.is_empty(), "no row for {missing:?}");
}

/// A health port that answers shows that the proxy is alive, wherever its /healthz is.
#[test]
fn healthz_elsewhere_is_no_dead_agent() {
    let all = |decides| {
        let proxy = Asking { decides, ..asking("n1", PROXY, EXCELLENT) };
        let port = (asking("n1", SERVICE, TWO), heard(SERVICE, "200 weight=2 web:2"), Duration::ZERO);
        Probed::new(vec![(proxy, Heard::Refused, Duration::ZERO), port])
    };
    assert_eq!(codes(&all(false), None), ["warning nothing-listens"]);
    assert_eq!(codes(&all(true), None), ["error nothing-listens"], "the balancer asks it");
}

#[test]
fn a_silent_kubelet_explains_silence_and_nothing_else() {
    let silent = Asking { kubelet_silent: true, ..asking("n1", PROXY, Answer::Silence) };
    for (answer, wanted) in
        [("silence", ""), ("unreachable", ""), (WELL, "note kubelet-only"), ("refused", "note kubelet-only")]
    {
        let probed = Probed::new(vec![(silent.clone(), heard(PROXY, answer), Duration::ZERO)]);
        assert_eq!(codes(&probed, None).join(","), wanted, "{answer}");
    }
}

/// Routers limit their ICMP errors: one is enough, in either round, unless something at the address
/// answers.
#[test]
fn one_icmp_error_explains_the_silence_of_its_address() {
    let ask = |question, answer: &str| {
        let expected = if question == PROXY { EXCELLENT } else { TWO };
        (asking("n1", question, expected), heard(question, answer), Duration::ZERO)
    };
    let causes = |probed: &Probed| {
        probed
            .answered
            .iter()
            .map(|one| one.difference.map_or("", |found| found.cause.code()))
            .collect::<Vec<_>>()
    };
    for ([first, second], again, wanted) in [
        (["unreachable", "silence"], None, ["wrong-address", "wrong-address"]),
        (["silence", "silence"], None, ["firewall", "firewall"]),
        (["unreachable", "unreachable"], Some(["silence", "silence"]), ["wrong-address", "wrong-address"]),
        (["unreachable", "silence"], Some(["silence", "silence"]), ["wrong-address", "wrong-address"]),
        (["unreachable", "silence"], Some(["refused", "silence"]), ["dead-agent", "firewall"]),
        (["silence", "silence"], Some(["silence", "unreachable"]), ["wrong-address", "wrong-address"]),
    ] {
        let mut probed = Probed::new(vec![ask(PROXY, first), ask(SERVICE, second)]);
        if let Some([first, second]) = again {
            let (askings, known) = probed.ask_again();
            assert_eq!(askings.len(), 2);
            probed = Probed::twice(known, vec![ask(PROXY, first), ask(SERVICE, second)]);
        }
        assert_eq!(causes(&probed), wanted, "{first} {second} {again:?}");
    }
}

#[test]
fn nodes_of_one_cause_share_a_finding() {
    let ask = |number: usize, answer: &str| {
        let asking = asking(&format!("n{number}"), SERVICE, TWO);
        (asking, heard(SERVICE, answer), Duration::ZERO)
    };
    let mut all: Vec<_> = (1..=5).map(|number| ask(number, "silence")).collect();
    all.push(ask(6, "200 weight=3 web:3"));
    let findings = Probed::new(all).findings(Some(&web()));
    assert_eq!(findings.len(), 2);
    assert_eq!(
        findings[0].what,
        "GET :32080 of shop/web at 5 nodes (n1, n2, n3, …): n1: silence, and the objects say 200, 2 endpoints; a firewall on the way \
         drops it, or the node is down"
    );
    assert!(findings[1].what.contains("at node n6: 200, 3 endpoints, and the objects say 200, 2 endpoints"));
}

#[test]
fn nodes_that_agents_leave_out_are_found() {
    let says = |node: &str, left_out: &str| {
        let body = format!(
            r#"200 {{"lastUpdated":"t","currentTime":"t","nodeEligible":true,"healthy":true,"cutOff":false,"leftOut":[{left_out}]}}"#
        );
        (asking(node, PROXY, EXCELLENT), heard(PROXY, &body), Duration::ZERO)
    };
    let probed =
        Probed::new(vec![says("n1", r#""n3", "\u001b[2J""#), says("n2", r#""n3", "n4", 7"#), says("n3", "")]);
    // The answers are as the objects say.
    assert_eq!(probed.differences(), 0);
    let findings = probed.findings(None);
    let whats: Vec<_> = findings.iter().map(|finding| (finding.code, finding.what.as_str())).collect();
    assert_eq!(
        whats,
        [
            (
                "left-out",
                "2 nodes (n1, n2) leave out the endpoints of node n3 for new connections: it does not answer there"
            ),
            (
                "left-out",
                "node n2 leaves out the endpoints of node n4 for new connections: it does not answer there"
            ),
        ]
    );
    assert_eq!(probed.findings(Some(&web())), []);
}

const NODES: &str = "\
apiVersion: v1
kind: Node
metadata: {name: n1}
status: {addresses: [{type: InternalIP, address: 192.0.2.1}, {type: InternalIP, address: 2001:db8::1}, {type: ExternalIP, address: 203.0.113.1}]}
---
apiVersion: v1
kind: Node
metadata: {name: n2}
spec: {taints: [{key: ToBeDeletedByClusterAutoscaler, effect: NoSchedule}]}
status: {addresses: [{type: InternalIP, address: 192.0.2.2}]}
---
apiVersion: v1
kind: Node
metadata: {name: n3}
status: {conditions: [{type: Ready, status: Unknown}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  type: LoadBalancer
  externalTrafficPolicy: Local
  healthCheckNodePort: 32080
  clusterIPs: [10.96.0.1, 'fd00::1']
  ipFamilies: [IPv4, IPv6]
  ports: [{name: http, port: 80, nodePort: 30080}, {name: dns, port: 53, protocol: UDP, nodePort: 30053}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}, {name: dns, port: 53, protocol: UDP}]
endpoints: [{addresses: [10.244.0.1], nodeName: n1, conditions: {ready: true}}]
";

fn questions(scope: Scope) -> Questions {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a.yaml"), NODES).unwrap();
    let mut index = Index::default();
    source::read_cluster(folder.path()).unwrap().apply(&mut index);
    let cluster = Cluster::new(index);
    let judge = Judge::new(&cluster, by_name("gke"), Overrides::default());
    let judgement = judge.service(&web()).unwrap();
    judge.questions(&[judgement], scope).unwrap()
}

/// Formats one line for each probe: node, probe, address, expected answer.
fn lines(questions: &Questions) -> Vec<String> {
    let askings = questions.askings.iter().map(|asking| {
        let to = asking.to.map_or_else(|| "-".to_owned(), |to| to.to_string());
        let decides = if asking.decides { " decides" } else { "" };
        format!("{} {:?} {to} {:?}{decides}", asking.node, asking.question, asking.expected)
    });
    askings.collect()
}

#[test]
fn questions_follow_from_the_objects_and_not_from_the_balancer() {
    let all = questions(Scope { address: NodeAddress::Internal, traffic: true });
    assert_eq!(
        lines(&all),
        [
            "n1 ProxyHealth 192.0.2.1:10256 Ok(None)",
            "n2 ProxyHealth 192.0.2.2:10256 Unavailable",
            "n3 ProxyHealth - Silence",
            "n1 ServiceHealth(32080) 192.0.2.1:32080 Ok(Some(1)) decides",
            "n2 ServiceHealth(32080) 192.0.2.2:32080 Unavailable decides",
            "n3 ServiceHealth(32080) - Silence decides",
            "n1 TrafficPort(30080) 192.0.2.1:30080 Open",
            "n2 TrafficPort(30080) 192.0.2.2:30080 Silence",
            "n3 TrafficPort(30080) - Silence",
            // n2 has no address of this family.
            "n1 TrafficPort(30080) [2001:db8::1]:30080 Refused",
            "n3 TrafficPort(30080) - Silence",
        ]
    );
    let udp: Vec<_> = all.not_asked.iter().map(ToString::to_string).collect();
    assert_eq!(udp, ["shop/web:dns", "shop/web:dns"]);
    let external = questions(Scope { address: NodeAddress::External, traffic: false });
    let asked: Vec<_> = external.askings.iter().filter_map(|asking| asking.to).collect();
    assert_eq!(asked, ["203.0.113.1:10256".parse().unwrap(), "203.0.113.1:32080".parse().unwrap()]);
    assert!(external.not_asked.is_empty());
}
