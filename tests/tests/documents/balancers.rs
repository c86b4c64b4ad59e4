//! docs/balancers.md: the behaviour that `lb` assumes of each balancer.

use std::time::Duration;

use traffic_policy_cluster::model::Policy;
use traffic_policy_lb::{Ask, Balancer, Check, Fact, PROFILES, Weights};

use crate::page;

const PAGE: &str = "docs/balancers.md";

#[test]
fn the_page_has_the_facts_of_every_balancer() {
    let header =
        ["`--balancer`", "policy", "asks", "every", "an answer within", "unhealthy after", "healthy after"];
    let rows: Vec<_> = PROFILES
        .into_iter()
        .flat_map(|balancer| [Policy::Cluster, Policy::Local].map(|policy| asked(balancer, policy)))
        .collect();
    page::compare(PAGE, "what is asked", &page::table(&header, &rows));
    let header = [
        "`--balancer`",
        "sends to all while all are unhealthy",
        "more to nodes with more pods",
        "one node at a time",
        "ends connections itself",
        "cuts connections of a node that turns unhealthy",
        "a router moves connections when the number of nodes changes",
        "controller hands a change on within",
    ];
    let rows: Vec<_> = PROFILES.into_iter().map(else_told).collect();
    page::compare(PAGE, "what else matters", &page::table(&header, &rows));
}

fn asked(balancer: &Balancer, policy: Policy) -> Vec<String> {
    let check: &Check = balancer.check(policy);
    let name = match policy {
        Policy::Cluster => format!("`{}`", balancer.name),
        Policy::Local => String::new(),
    };
    let ask = fact(check.ask, |ask| {
        match ask {
            Ask::ProxyHealth => "`/healthz` on 10256",
            Ask::ServiceHealth => "`healthCheckNodePort`",
            Ask::TrafficPort => "traffic port",
            Ask::Nothing => "nothing: announced while there are endpoints",
        }
        .to_owned()
    });
    let times = match check.ask.value {
        Ask::Nothing => [(); 4].map(|()| String::new()),
        _ => [
            fact(check.interval, seconds),
            fact(check.timeout, seconds),
            fact(check.failures, |count| count.to_string()),
            fact(check.successes, |count| count.to_string()),
        ],
    };
    [name, format!("{policy:?}"), ask].into_iter().chain(times).collect()
}

fn else_told(balancer: &Balancer) -> Vec<String> {
    let yes = |value: bool| if value { "yes" } else { "no" }.to_owned();
    vec![
        format!("`{}`", balancer.name),
        fact(balancer.fail_open, yes),
        fact(balancer.weights, |weights| match weights {
            Weights::Never => "no".to_owned(),
            Weights::Always => "yes".to_owned(),
            Weights::Annotated(name, value) => format!("with the annotation `{name}: {value}`"),
        }),
        yes(balancer.one_node),
        fact(balancer.proxies, yes),
        fact(balancer.cuts, yes),
        fact(balancer.rehashes, yes),
        fact(balancer.controller, seconds),
    ]
}

fn seconds(time: Duration) -> String {
    format!("{} s", time.as_secs())
}

/// A fact as text, marked if it is assumed.
fn fact<T: Copy>(fact: Fact<T>, text: impl Fn(T) -> String) -> String {
    format!("{}{}", text(fact.value), if fact.sure { "" } else { " ?" })
}
