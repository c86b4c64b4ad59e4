//! Details of objects that the judgement of a whole cluster needs and a proxy does not: balancers,
//! pods' names, the facts about Nodes that the scheduler and balancers use.

use k8s_openapi::api::{core::v1 as core, discovery::v1 as discovery};

use super::{Author, FieldError};
use crate::model::{
    address::parse_ip,
    object::{self, NodeFacts, Readiness, Signs},
};

const EXCLUDED_LABEL: &str = "node.kubernetes.io/exclude-from-external-load-balancers";
const TO_BE_DELETED_TAINT: &str = "ToBeDeletedByClusterAutoscaler";

/// Labels of machines that the cloud may take away at any time; `None`: any value.
const PREEMPTIBLE: [(&str, Option<&str>); 6] = [
    ("cloud.google.com/gke-spot", Some("true")),
    ("cloud.google.com/gke-preemptible", Some("true")),
    ("eks.amazonaws.com/capacityType", Some("SPOT")),
    ("karpenter.sh/capacity-type", Some("spot")),
    ("kubernetes.azure.com/scalesetpriority", Some("spot")),
    ("node.kubernetes.io/preemptible", None),
];

/// Prefixes of the annotations of balancers.
const BALANCERS: [&str; 8] = [
    "cloud.google.com/",
    "networking.gke.io/",
    "service.beta.kubernetes.io/aws-",
    "service.beta.kubernetes.io/azure-",
    "service.beta.kubernetes.io/port_",
    "alb.ingress.kubernetes.io/",
    "metallb.",
    "traffic-policy.io/",
];

/// The set of fields that are read from an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::source) enum Detail {
    /// Fields that a proxy needs.
    Proxy,
    /// Fields that the judgement of a cluster needs.
    Cluster,
}

pub(in crate::source) fn service(
    service: &core::Service,
    author: Author,
    detail: Detail,
) -> Result<Option<object::Service>, FieldError> {
    let mut converted = super::service(service, author)?;
    if let (Detail::Cluster, Some(converted)) = (detail, &mut converted) {
        converted.signs = Some(Box::new(signs(service)));
    }
    Ok(converted)
}

pub(in crate::source) fn endpoint_slice(
    slice: &discovery::EndpointSlice,
    detail: Detail,
) -> Result<Option<object::EndpointSlice>, FieldError> {
    super::slice_with(slice, |endpoint| match (detail, &endpoint.target_ref) {
        (Detail::Cluster, Some(target)) => target.name.as_deref().map(Into::into),
        _ => None,
    })
}

pub(in crate::source) fn node(node: &core::Node, detail: Detail) -> Result<object::Node, FieldError> {
    let mut converted = super::node(node)?;
    if detail == Detail::Cluster {
        converted.standing = facts(node);
    }
    Ok(converted)
}

fn signs(service: &core::Service) -> Signs {
    let spec = service.spec.as_ref();
    let annotations = service.metadata.annotations.iter().flatten();
    let ingress = service.status.as_ref().and_then(|status| status.load_balancer.as_ref()?.ingress.as_ref());
    Signs {
        class: spec.and_then(|spec| spec.load_balancer_class.clone()),
        annotations: annotations
            .filter(|(name, _)| BALANCERS.iter().any(|prefix| name.starts_with(prefix)))
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect(),
        hostnames: ingress.into_iter().flatten().filter_map(|ingress| ingress.hostname.clone()).collect(),
        proxy_mode: ingress.into_iter().flatten().any(|ingress| ingress.ip_mode.as_deref() == Some("Proxy")),
        selector: spec
            .and_then(|spec| spec.selector.as_ref())
            .into_iter()
            .flatten()
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect(),
    }
}

fn facts(node: &core::Node) -> NodeFacts {
    let labels = node.metadata.labels.as_ref();
    let label = |name: &str| labels.and_then(|labels| labels.get(name)).map(String::as_str);
    let spec = node.spec.as_ref();
    let taints = spec.and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let ready = conditions.iter().find(|condition| condition.type_ == "Ready");
    let listed = node.status.as_ref().and_then(|status| status.addresses.as_deref()).unwrap_or_default();
    let of_type = |wanted: &str| {
        let wanted = listed.iter().filter(|address| address.type_ == wanted);
        wanted.filter_map(|address| parse_ip(&address.address)).collect()
    };
    NodeFacts {
        deleting: node.metadata.deletion_timestamp.is_some(),
        to_be_deleted: taints.iter().any(|taint| taint.key == TO_BE_DELETED_TAINT),
        excluded: label(EXCLUDED_LABEL).is_some(),
        unschedulable: spec.and_then(|spec| spec.unschedulable).unwrap_or(false),
        readiness: match ready.map(|condition| condition.status.as_str()) {
            None | Some("True") => Readiness::Ready,
            Some("False") => Readiness::NotReady,
            Some(_) => Readiness::Unknown,
        },
        preemptible: PREEMPTIBLE.iter().any(|(name, wanted)| match (label(name), wanted) {
            (Some(value), Some(wanted)) => value == *wanted,
            (found, None) => found.is_some(),
            (None, _) => false,
        }),
        provider: spec
            .and_then(|spec| spec.provider_id.as_deref()?.split_once("://"))
            .map(|(provider, _)| provider.into()),
        internal_ips: of_type("InternalIP"),
        external_ips: of_type("ExternalIP"),
    }
}
