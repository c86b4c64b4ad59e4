//! Health ports that an annotation gives to Services of type NodePort: whether a balancer is
//! assumed to check them, and advice for Services that could have one.

use traffic_policy_cluster::model::{
    HEALTH_PORT_ANNOTATION,
    object::{Service, ServiceType},
};

use super::{
    balancer::{Ask, Balancer, sure, unsure},
    cluster::Cluster,
    fix,
    profiles::AWS_ALB,
};

/// Annotation of a Service or its Ingress by which the AWS Load Balancer Controller learns the port
/// that an ALB checks.
const ALB_PORT: &str = "alb.ingress.kubernetes.io/healthcheck-port";

fn alb_port(service: &Service) -> Option<&str> {
    let signs = service.signs.as_deref()?;
    signs.annotations.iter().find(|(name, _)| name == ALB_PORT).map(|(_, value)| value.as_str())
}

/// Sets the balancer's check to the health port that an annotation gives. It is certain if an
/// annotation of the balancer names that port, otherwise assumed.
pub(super) fn told(cluster: &Cluster, service: &Service, balancer: &mut Balancer) {
    let port = service.health_annotation;
    let has_one = service.service_type == ServiceType::NodePort
        && port != 0
        && !cluster.index().is_health_port_refused(service);
    if !has_one || balancer.local.ask.value != Ask::TrafficPort {
        return;
    }
    match alb_port(service) {
        None => balancer.local.ask = unsure(Ask::ServiceHealth),
        Some(told) if told == port.to_string() => balancer.local.ask = sure(Ask::ServiceHealth),
        Some(_) => {}
    }
}

/// Returns a port that no Service has.
fn free(cluster: &Cluster) -> u16 {
    const FROM: u16 = 31_999;
    (30_000..=FROM).rev().find(|port| !cluster.index().is_port_taken(*port)).unwrap_or(FROM)
}

/// Returns YAML that gives a Service of type NodePort a health port, its own or a free one, and
/// lets its balancer check it.
pub(super) fn fix(cluster: &Cluster, service: &Service, balancer: &Balancer) -> String {
    let refused = cluster.index().is_health_port_refused(service);
    let port = match service.health_annotation {
        port if port != 0 && !refused => port,
        _ => free(cluster),
    };
    let mut yaml = fix::annotation(HEALTH_PORT_ANNOTATION, &port.to_string());
    if balancer.name == AWS_ALB.name {
        yaml.push_str(&format!("  # here, or in the Ingress\n  {ALB_PORT}: \"{port}\"\n"));
    }
    yaml
}
