//! Queries of an [`Index`] about the ports that Services want on nodes.

use super::Index;
use crate::model::{
    ServiceName,
    object::{Service, ServiceType},
};

impl Index {
    /// Whether the health port that a Service's annotation gives it, or would give it under policy
    /// Local, is unavailable as of the last [`Index::update`].
    #[must_use]
    pub fn is_health_port_refused(&self, service: &Service) -> bool {
        service.service_type == ServiceType::NodePort
            && service.health_annotation != 0
            && self.health_port_refusal(&service.name, service.health_annotation).is_some()
    }

    /// Whether any Service has this TCP port on each node, as its node port or health port, as of
    /// the last [`Index::update`].
    #[must_use]
    pub fn is_port_taken(&self, port: u16) -> bool {
        self.ports.has(port)
    }

    pub(super) fn health_port_refusal(&self, name: &ServiceName, port: u16) -> Option<String> {
        let created = self.services.get(name).and_then(|service| service.created);
        let refused = self.context.input.health_ports.refusal(port);
        refused.or_else(|| self.ports.lost_to(name, created, port))
    }
}
