//! Findings about the port that a balancer checks under policy Local.

use traffic_policy_cluster::model::{Policy, object::ServiceType};

use super::{Case, span};
use crate::{
    balancer::Ask,
    finding::{Finding, Level},
    health_port,
    verdict::{Answer, Fate, Question, Row},
};

impl Case<'_, '_> {
    pub(super) fn times_out(&self) -> Option<Finding> {
        if self.judgement.policy != Policy::Local || !matches!(self.port.question, Question::TrafficPort(_)) {
            return None;
        }
        let bad = |row: &Row<'_>| row.answer == Answer::Silence && row.fate == Fate::Dropped;
        if self.port.sum(bad).0 == 0 {
            return None;
        }
        let balancer = &self.judgement.balancer;
        let what = format!(
            "the check of {} gets silence instead of a refusal, for policy Local drops what it cannot serve: it takes up to \
             {} until the balancer gives such a node up, and a client sent there waits as long",
            self.nodes(bad),
            span(balancer.notices_silence(Policy::Local).value)
        );
        let finding = |fix: &str| Finding::new(Level::Warning, "check-times-out", what, fix);
        Some(if self.is_node_port() {
            finding(
                "give the Service a health port, which says 503 at once on such a node, and let the balancer ask it by HTTP (of \
                 type LoadBalancer it has one by itself)",
            )
            .with_yaml(self.health_port_yaml())
        } else {
            finding("let the balancer ask the healthCheckNodePort, which says 503 at once on such a node")
        })
    }

    pub(super) fn is_node_port(&self) -> bool {
        self.judgement.service.service_type == ServiceType::NodePort
    }

    pub(super) fn health_port_yaml(&self) -> String {
        health_port::fix(self.cluster, self.judgement.service, &self.judgement.balancer)
    }

    /// Reports that the balancer is assumed to check the health port of an annotation, without
    /// evidence that it does.
    pub(super) fn assumed_to_ask(&self) -> Option<Finding> {
        let Question::ServiceHealth(port) = self.port.question else { return None };
        if !self.is_node_port() || self.judgement.balancer.local.ask.sure {
            return None;
        }
        let what = format!(
            "{} has the health port {port} by its annotation, and {} is taken to ask it; nothing in the objects shows that it does",
            self.name(),
            self.judgement.balancer.name
        );
        let fix = format!("see that the balancer's check is HTTP on port {port}, with any path");
        Some(Finding::new(Level::Note, "health-port-assumed", what, fix).with_yaml(self.health_port_yaml()))
    }

    pub(super) fn no_health_port(&self) -> Option<Finding> {
        let service = self.judgement.service;
        let asked = self.judgement.balancer.local.ask.value == Ask::ServiceHealth;
        (self.judgement.policy == Policy::Local
            && service.service_type == ServiceType::LoadBalancer
            && service.health_check_node_port == 0
            && asked)
            .then(|| {
                Finding::new(
                    Level::Note,
                    "no-health-port",
                    format!(
                        "{} has no healthCheckNodePort here; the API server gives it one, and until then its traffic port is taken \
                         to be asked",
                        self.name()
                    ),
                    "write spec.healthCheckNodePort into the manifest, or judge the cluster itself",
                )
            })
    }
}
