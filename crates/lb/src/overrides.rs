//! Facts about a balancer that the user gives, by flags or in a file.

use std::{str::FromStr, time::Duration};

use clap::Args;
use serde::Deserialize;
use traffic_policy_cluster::model::parse_duration;

use super::balancer::{Ask, Balancer, Weights, sure};

/// A duration as Kubernetes users write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Span(pub Duration);

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parse_duration(text)
            .map(Self)
            .ok_or_else(|| format!("`{text}` is not a time: write 30s, 2m, 500ms or 0"))
    }
}

impl TryFrom<String> for Span {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// The values of `--check-under-cluster` and `--check-under-local`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Asked {
    /// `/healthz` on port 10256.
    ProxyHealth,
    /// The healthCheckNodePort.
    ServiceHealth,
    /// A connection to the node port.
    TrafficPort,
    /// Nothing: nodes with endpoints are announced.
    Nothing,
}

/// Settings that override those of the balancer's profile. Each applies to both policies unless its
/// description names one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
#[command(next_help_heading = "The balancer")]
pub struct Overrides {
    /// Health check of nodes under policy Cluster.
    #[arg(long, env = "TRAFFIC_POLICY_CHECK_UNDER_CLUSTER", value_name = "WHAT")]
    pub check_under_cluster: Option<Asked>,
    /// Health check of nodes under policy Local.
    #[arg(long, env = "TRAFFIC_POLICY_CHECK_UNDER_LOCAL", value_name = "WHAT")]
    pub check_under_local: Option<Asked>,
    /// Interval of its health checks.
    #[arg(long, env = "TRAFFIC_POLICY_CHECK_INTERVAL", value_name = "TIME")]
    pub check_interval: Option<Span>,
    /// Time limit of an answer to a health check.
    #[arg(long, env = "TRAFFIC_POLICY_CHECK_TIMEOUT", value_name = "TIME")]
    pub check_timeout: Option<Span>,
    /// Number of consecutive failures after which a node gets no traffic.
    #[arg(long, env = "TRAFFIC_POLICY_CHECK_FAILURES", value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub check_failures: Option<u32>,
    /// Number of consecutive successes after which a node gets traffic.
    #[arg(long, env = "TRAFFIC_POLICY_CHECK_SUCCESSES", value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub check_successes: Option<u32>,
    /// Time until its controller has propagated a change of the Service.
    #[arg(long, env = "TRAFFIC_POLICY_CONTROLLER_DELAY", value_name = "TIME")]
    pub controller_delay: Option<Span>,
    /// Whether it sends to all nodes while none is healthy.
    #[arg(long, env = "TRAFFIC_POLICY_FAIL_OPEN", value_name = "true|false")]
    pub fail_open: Option<bool>,
    /// Whether it sends more to nodes with more pods, according to the health port's header.
    #[arg(long, env = "TRAFFIC_POLICY_WEIGHTED", value_name = "true|false")]
    pub weighted: Option<bool>,
}

impl From<Asked> for Ask {
    fn from(asked: Asked) -> Self {
        match asked {
            Asked::ProxyHealth => Self::ProxyHealth,
            Asked::ServiceHealth => Self::ServiceHealth,
            Asked::TrafficPort => Self::TrafficPort,
            Asked::Nothing => Self::Nothing,
        }
    }
}

impl Overrides {
    /// Overrides these settings with those of `other`.
    pub fn prefer(&mut self, other: &Self) {
        fn prefer<T: Copy>(mine: &mut Option<T>, other: Option<T>) {
            *mine = other.or(*mine);
        }
        prefer(&mut self.check_under_cluster, other.check_under_cluster);
        prefer(&mut self.check_under_local, other.check_under_local);
        prefer(&mut self.check_interval, other.check_interval);
        prefer(&mut self.check_timeout, other.check_timeout);
        prefer(&mut self.check_failures, other.check_failures);
        prefer(&mut self.check_successes, other.check_successes);
        prefer(&mut self.controller_delay, other.controller_delay);
        prefer(&mut self.fail_open, other.fail_open);
        prefer(&mut self.weighted, other.weighted);
    }

    /// Applies the settings to a profile. Facts from the user count as sure.
    pub fn apply(&self, balancer: &mut Balancer) {
        for (check, asked) in
            [(&mut balancer.cluster, self.check_under_cluster), (&mut balancer.local, self.check_under_local)]
        {
            if let Some(asked) = asked {
                check.ask = sure(asked.into());
            }
            if let Some(Span(interval)) = self.check_interval {
                check.interval = sure(interval);
            }
            if let Some(Span(timeout)) = self.check_timeout {
                check.timeout = sure(timeout);
            }
            if let Some(failures) = self.check_failures {
                check.failures = sure(failures);
            }
            if let Some(successes) = self.check_successes {
                check.successes = sure(successes);
            }
        }
        if let Some(Span(delay)) = self.controller_delay {
            balancer.controller = sure(delay);
        }
        if let Some(fail_open) = self.fail_open {
            balancer.fail_open = sure(fail_open);
        }
        if let Some(weighted) = self.weighted {
            balancer.weights = sure(if weighted { Weights::Always } else { Weights::Never });
        }
    }
}
