//! The balancers that are known by name. docs/balancers.md has the source of each fact.

use std::time::Duration;

use super::balancer::{Ask, Balancer, Check, Fact, Weights, sure, unsure};

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

const fn check(
    ask: Fact<Ask>,
    interval: Fact<Duration>,
    timeout: Fact<Duration>,
    failures: Fact<u32>,
    successes: Fact<u32>,
) -> Check {
    Check { ask, interval, timeout, failures, successes }
}

/// The check of balancers whose speakers announce from the nodes: none.
const ANNOUNCED: Check = check(sure(Ask::Nothing), sure(seconds(0)), sure(seconds(0)), sure(1), sure(1));

pub const GKE: Balancer = Balancer {
    name: "gke",
    cluster: check(sure(Ask::ProxyHealth), sure(seconds(8)), sure(seconds(1)), sure(3), sure(1)),
    local: check(sure(Ask::ServiceHealth), sure(seconds(3)), sure(seconds(1)), sure(2), sure(1)),
    fail_open: unsure(true),
    weights: sure(Weights::Annotated("networking.gke.io/weighted-load-balancing", "pods-per-node")),
    one_node: false,
    controller: unsure(seconds(30)),
    vanished: unsure(seconds(0)),
    proxies: sure(false),
    cuts: sure(false),
    rehashes: sure(false),
};

pub const AWS_NLB: Balancer = Balancer {
    name: "aws-nlb",
    cluster: check(sure(Ask::TrafficPort), sure(seconds(10)), sure(seconds(10)), sure(3), sure(3)),
    local: check(sure(Ask::ServiceHealth), sure(seconds(10)), sure(seconds(6)), sure(2), sure(2)),
    fail_open: sure(true),
    weights: sure(Weights::Never),
    one_node: false,
    controller: unsure(seconds(30)),
    vanished: unsure(seconds(0)),
    proxies: sure(false),
    cuts: sure(true),
    rehashes: sure(false),
};

pub const AWS_ALB: Balancer = Balancer {
    name: "aws-alb",
    cluster: check(sure(Ask::TrafficPort), sure(seconds(15)), sure(seconds(5)), sure(2), sure(2)),
    local: check(sure(Ask::TrafficPort), sure(seconds(15)), sure(seconds(5)), sure(2), sure(2)),
    fail_open: sure(true),
    weights: sure(Weights::Never),
    one_node: false,
    controller: unsure(seconds(30)),
    vanished: unsure(seconds(0)),
    proxies: sure(true),
    cuts: unsure(false),
    rehashes: sure(false),
};

pub const AZURE: Balancer = Balancer {
    name: "azure",
    cluster: check(unsure(Ask::ProxyHealth), sure(seconds(5)), unsure(seconds(5)), sure(2), unsure(2)),
    local: check(sure(Ask::ServiceHealth), sure(seconds(5)), unsure(seconds(5)), sure(2), unsure(2)),
    fail_open: unsure(false),
    weights: unsure(Weights::Never),
    one_node: false,
    controller: unsure(seconds(30)),
    vanished: unsure(seconds(0)),
    proxies: sure(false),
    cuts: unsure(false),
    rehashes: sure(false),
};

pub const CLOUD_PROVIDER_KIND: Balancer = Balancer {
    name: "cloud-provider-kind",
    cluster: check(sure(Ask::ProxyHealth), sure(seconds(3)), sure(seconds(5)), sure(2), sure(1)),
    local: check(sure(Ask::ServiceHealth), sure(seconds(3)), sure(seconds(5)), sure(2), sure(1)),
    fail_open: unsure(true),
    weights: sure(Weights::Never),
    one_node: false,
    controller: unsure(seconds(5)),
    vanished: unsure(seconds(0)),
    proxies: sure(true),
    cuts: unsure(false),
    rehashes: sure(false),
};

pub const METALLB_L2: Balancer = Balancer {
    name: "metallb-l2",
    cluster: ANNOUNCED,
    local: ANNOUNCED,
    fail_open: sure(false),
    weights: sure(Weights::Never),
    one_node: true,
    controller: unsure(seconds(1)),
    vanished: unsure(seconds(10)),
    proxies: sure(false),
    cuts: sure(true),
    rehashes: sure(false),
};

pub const METALLB_BGP: Balancer = Balancer {
    name: "metallb-bgp",
    cluster: ANNOUNCED,
    local: ANNOUNCED,
    fail_open: sure(false),
    weights: sure(Weights::Never),
    one_node: false,
    controller: unsure(seconds(1)),
    vanished: unsure(seconds(90)),
    proxies: sure(false),
    cuts: unsure(true),
    rehashes: unsure(true),
};

pub const HAPROXY: Balancer = Balancer {
    name: "haproxy",
    cluster: check(unsure(Ask::ProxyHealth), sure(seconds(2)), sure(seconds(2)), sure(3), sure(2)),
    local: check(unsure(Ask::ServiceHealth), sure(seconds(2)), sure(seconds(2)), sure(3), sure(2)),
    fail_open: sure(false),
    weights: unsure(Weights::Never),
    one_node: false,
    controller: unsure(seconds(0)),
    vanished: unsure(seconds(0)),
    proxies: sure(true),
    cuts: sure(false),
    rehashes: sure(false),
};

/// Assumptions about an unknown balancer, which flags or a file override.
pub const CUSTOM: Balancer = Balancer {
    name: "custom",
    cluster: check(unsure(Ask::ProxyHealth), unsure(seconds(10)), unsure(seconds(5)), unsure(3), unsure(2)),
    local: check(unsure(Ask::ServiceHealth), unsure(seconds(10)), unsure(seconds(5)), unsure(3), unsure(2)),
    fail_open: unsure(false),
    weights: unsure(Weights::Never),
    one_node: false,
    controller: unsure(seconds(30)),
    vanished: unsure(seconds(0)),
    proxies: unsure(false),
    cuts: unsure(false),
    rehashes: unsure(false),
};

/// All profiles.
pub const PROFILES: [&Balancer; 9] =
    [&GKE, &AWS_NLB, &AWS_ALB, &AZURE, &CLOUD_PROVIDER_KIND, &METALLB_L2, &METALLB_BGP, &HAPROXY, &CUSTOM];

#[must_use]
pub fn by_name(name: &str) -> Option<&'static Balancer> {
    PROFILES.into_iter().find(|balancer| balancer.name == name)
}
