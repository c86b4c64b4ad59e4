//! Conversion of API objects to the model's, shared by the Kubernetes API and by manifests.
//!
//! There are two kinds of fault: a value that the API server would never store (an unknown policy,
//! a port out of range) is an error that names the field; a value that is plausible but unusable
//! (an invalid address, an unknown protocol) is left out and reported with the object.

mod annotations;
pub(super) mod detail;
mod nodes;
mod problems;

use std::{
    collections::HashMap,
    fmt,
    net::IpAddr,
    time::{Duration, SystemTime},
};

use ipnet::IpNet;
use k8s_openapi::{
    api::{
        core::v1::{self as core},
        discovery::v1 as discovery,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
    jiff::Timestamp,
};

pub(super) use self::nodes::{
    DIRECT_ADDRESSES, DIRECT_CHOICE, DIRECT_DISPATCH, DIRECT_LABEL, DIRECT_MACS, DIRECT_OPENS,
    DIRECT_PROTOCOLS, DIRECT_REPLY, DIRECT_SENDS, DIRECT_TUNNEL, DIRECT_TUNNEL_SCTP, OPENED_PROTOCOLS,
    direct, leaving, node, service_cidr,
};
use self::problems::{Problems, quoted};
use crate::model::{OTHER_PROTOCOLS, Policy, Protocol, ServiceName, address::parse_cidr, object};

/// The label of Services and EndpointSlices that no proxy serves; the following label names another
/// proxy.
const HEADLESS_LABEL: &str = "service.kubernetes.io/headless";
const OTHER_PROXY_LABEL: &str = "service.kubernetes.io/service-proxy-name";
/// The label selector of Services. It includes those of other proxies, because their ClusterIPs are
/// allocated.
pub(super) const SERVICE_SELECTOR: &str = "!service.kubernetes.io/headless";
pub(super) const SLICE_SELECTOR: &str =
    "!service.kubernetes.io/headless,!service.kubernetes.io/service-proxy-name";
const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";
const LAST_CHANGE_ANNOTATION: &str = "endpoints.kubernetes.io/last-change-trigger-time";

/// An invalid value of a field.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {message}")]
pub(super) struct FieldError {
    pub(super) path: String,
    pub(super) message: String,
}

impl FieldError {
    fn new(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { path: path.into(), message: message.into() }
    }
}

/// Returns the namespace and name; the namespace is `default` where a manifest has none.
pub(super) fn name(metadata: &ObjectMeta) -> Result<ServiceName, FieldError> {
    let name = metadata.name.clone().filter(|name| !name.is_empty());
    Ok(ServiceName {
        namespace: metadata.namespace.clone().unwrap_or_else(|| "default".to_owned()),
        name: name.ok_or_else(|| FieldError::new("metadata.name", "missing"))?,
    })
}

fn has_label(metadata: &ObjectMeta, label: &str) -> bool {
    metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(label))
}

/// The author of an object's fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Author {
    ApiServer,
    /// A person, who assigns no cluster IP where none is given: the Service is then reached by its
    /// other addresses only.
    Person,
}

/// Converts a Service. `None` if no proxy serves it: headless, or `ExternalName`.
pub(super) fn service(
    service: &core::Service,
    author: Author,
) -> Result<Option<object::Service>, FieldError> {
    let name = name(&service.metadata)?;
    let empty = core::ServiceSpec::default();
    let spec = service.spec.as_ref().unwrap_or(&empty);
    let service_type = match spec.type_.as_deref() {
        None | Some("ClusterIP") => object::ServiceType::ClusterIp,
        Some("NodePort") => object::ServiceType::NodePort,
        Some("LoadBalancer") => object::ServiceType::LoadBalancer,
        Some("ExternalName") => return Ok(None),
        Some(other) => {
            return Err(unknown("spec.type", other, "ClusterIP, NodePort, LoadBalancer or ExternalName"));
        }
    };
    if has_label(&service.metadata, HEADLESS_LABEL) || spec.cluster_ip.as_deref() == Some("None") {
        return Ok(None);
    }

    let mut problems = Problems { object: format!("Service {name}"), sentences: Vec::new() };
    let cluster_ips = match &spec.cluster_ips {
        Some(ips) if !ips.is_empty() => problems.addresses("spec.clusterIPs", ips),
        _ => problems.addresses("spec.clusterIP", spec.cluster_ip.as_slice()),
    };
    let foreign = has_label(&service.metadata, OTHER_PROXY_LABEL);
    if foreign {
        let created = None;
        return Ok(Some(object::Service {
            created,
            foreign,
            cluster_ips,
            ..object::Service::unserved(name)
        }));
    }
    let mut families = [false, true].map(|ipv6| cluster_ips.iter().any(|ip| ip.is_ipv6() == ipv6));
    if cluster_ips.is_empty() {
        if author == Author::Person && problems.sentences.is_empty() {
            let named = spec.ip_families.as_deref().unwrap_or_default();
            families =
                ["IPv4", "IPv6"].map(|family| named.is_empty() || named.iter().any(|name| name == family));
        } else {
            problems.tell("spec.clusterIP", "is empty, so this Service is not proxied");
        }
    }
    let external_ips =
        problems.addresses("spec.externalIPs", spec.external_ips.as_deref().unwrap_or_default());
    let ingress: Vec<_> = service
        .status
        .iter()
        .filter_map(|status| status.load_balancer.as_ref()?.ingress.as_ref())
        .flatten()
        // With ipMode Proxy the load balancer terminates the connection itself and connects to the
        // node port.
        .filter(|ingress| ingress.ip_mode.as_deref() != Some("Proxy"))
        .filter_map(|ingress| ingress.ip.clone())
        .collect();
    let drain = annotations::drain(&service.metadata, &mut problems);
    let health_annotation = annotations::health_port(&service.metadata, &mut problems);
    let algorithm = annotations::algorithm(&service.metadata, &mut problems);
    let weights = annotations::weights(&service.metadata, &mut problems);
    let external_fallback = annotations::external_fallback(&service.metadata, &mut problems);
    let forwarding = annotations::forwarding(&service.metadata, &mut problems);

    Ok(Some(object::Service {
        created: service.metadata.creation_timestamp.as_ref().map(|time| time.0.as_second()),
        service_type,
        foreign,
        cluster_ips,
        ipv4: families[0],
        ipv6: families[1],
        external_ips,
        load_balancer_ips: problems.addresses("status.loadBalancer.ingress", &ingress),
        ports: ports(spec, &mut problems)?,
        external_policy: policy("spec.externalTrafficPolicy", spec.external_traffic_policy.as_deref())?,
        internal_policy: policy("spec.internalTrafficPolicy", spec.internal_traffic_policy.as_deref())?,
        source_ranges: source_ranges(spec, &mut problems),
        affinity: affinity(spec)?,
        health_check_node_port: optional_port("spec.healthCheckNodePort", spec.health_check_node_port)?,
        health_annotation,
        external_fallback,
        forwarding,
        algorithm,
        weights,
        drain,
        signs: None,
        problems: problems.sentences,
        name,
    }))
}

/// The number of ports of other protocols that are reported by name.
const UNTRANSLATED: usize = 20;

fn ports(spec: &core::ServiceSpec, problems: &mut Problems) -> Result<Vec<object::Port>, FieldError> {
    let mut ports = Vec::new();
    let (mut untranslated, mut fields) = (0, Vec::new());
    let mut names = HashMap::new();
    for (i, port) in spec.ports.iter().flatten().enumerate() {
        let number = optional_port(&format!("spec.ports[{i}].port"), Some(port.port))?;
        if number == 0 {
            return Err(FieldError::new(format!("spec.ports[{i}].port"), "0 is not a port"));
        }
        let node_port = optional_port(&format!("spec.ports[{i}].nodePort"), port.node_port)?;
        let name = port.name.clone().unwrap_or_default();
        // The API server rejects two ports with the same name and protocol. One of them would stand
        // for both.
        let taken = (port.name.as_deref().unwrap_or_default(), protocol(port.protocol.as_deref()));
        if let Some(first) = names.insert(taken, i) {
            let which = if name.is_empty() { "it has no name".to_owned() } else { format!("{name:?}") };
            return Err(FieldError::new(
                format!("spec.ports[{i}].name"),
                format!("{which}, as spec.ports[{first}]: ports of one protocol need names of their own"),
            ));
        }
        let Some(protocol) = protocol(port.protocol.as_deref()) else {
            let protocol = port.protocol.as_deref().unwrap_or_default();
            untranslated += 1;
            if untranslated <= UNTRANSLATED {
                fields.push(format!("spec.ports[{i}] {protocol}"));
            }
            continue;
        };
        ports.push(object::Port { name, protocol, port: number, node_port });
    }
    if untranslated > 0 {
        if let Some(more @ 1..) = untranslated.checked_sub(UNTRANSLATED) {
            fields.push(format!("and {more} more"));
        }
        problems.tell(&fields.join(", "), OTHER_PROTOCOLS);
    }
    Ok(ports)
}

fn affinity(spec: &core::ServiceSpec) -> Result<Option<Duration>, FieldError> {
    match spec.session_affinity.as_deref() {
        None | Some("None" | "") => Ok(None),
        Some("ClientIP") => {
            let config = spec.session_affinity_config.as_ref().and_then(|config| config.client_ip.as_ref());
            let seconds = config.and_then(|config| config.timeout_seconds).unwrap_or(10_800);
            match u64::try_from(seconds) {
                Ok(seconds @ 1..=86_400) => Ok(Some(Duration::from_secs(seconds))),
                _ => Err(FieldError::new(
                    "spec.sessionAffinityConfig.clientIP.timeoutSeconds",
                    format!("{seconds} is not within 1 to 86400"),
                )),
            }
        }
        Some(other) => Err(unknown("spec.sessionAffinity", other, "None or ClientIP")),
    }
}

/// Returns the source ranges. A list in which every entry is unreadable must not mean "every
/// source": it admits no source.
fn source_ranges(spec: &core::ServiceSpec, problems: &mut Problems) -> Vec<IpNet> {
    const NO_SOURCE: [&str; 2] = ["255.255.255.255/32", "::/128"];
    let texts = spec.load_balancer_source_ranges.as_deref().unwrap_or_default();
    let mut ranges = Vec::new();
    for (i, text) in texts.iter().enumerate() {
        match parse_cidr(text) {
            Some(range) => ranges.push(range),
            None => problems.tell(
                &format!("spec.loadBalancerSourceRanges[{i}]"),
                &format!("{} is not a CIDR and lets no source in", quoted(text)),
            ),
        }
    }
    if ranges.is_empty() && !texts.is_empty() {
        ranges.extend(NO_SOURCE.iter().filter_map(|text| text.parse::<IpNet>().ok()));
    }
    ranges
}

/// Converts a slice. `None` if this proxy does not serve it: headless, without a Service, or with
/// names instead of addresses.
pub(super) fn endpoint_slice(
    slice: &discovery::EndpointSlice,
) -> Result<Option<object::EndpointSlice>, FieldError> {
    slice_with(slice, |_| None)
}

fn slice_with(
    slice: &discovery::EndpointSlice,
    pod: impl Fn(&discovery::Endpoint) -> Option<Box<str>>,
) -> Result<Option<object::EndpointSlice>, FieldError> {
    let name = name(&slice.metadata)?;
    let labels = slice.metadata.labels.as_ref();
    let service = labels.and_then(|labels| labels.get(SERVICE_NAME_LABEL)).filter(|name| !name.is_empty());
    let ipv6 = match slice.address_type.as_str() {
        "IPv4" => false,
        "IPv6" => true,
        "FQDN" => return Ok(None),
        other => return Err(unknown("addressType", other, "IPv4, IPv6 or FQDN")),
    };
    let other = [HEADLESS_LABEL, OTHER_PROXY_LABEL].iter().any(|label| has_label(&slice.metadata, label));
    let Some(service) = service.filter(|_| !other) else { return Ok(None) };

    let mut problems = Problems { object: format!("EndpointSlice {name}"), sentences: Vec::new() };
    let mut ports = Vec::new();
    for (i, port) in slice.ports.iter().flatten().enumerate() {
        let number = optional_port(&format!("ports[{i}].port"), port.port)?;
        // A port without a number means "all ports", which no proxy can translate. Other protocols
        // are reported with the Service.
        if let (1.., Some(protocol)) = (number, protocol(port.protocol.as_deref())) {
            ports.push(object::SlicePort {
                name: port.name.clone().unwrap_or_default(),
                protocol,
                port: number,
            });
        }
    }
    let endpoints = slice
        .endpoints
        .iter()
        .enumerate()
        .filter_map(|(i, endpoint)| {
            let field = format!("endpoints[{i}].addresses[0]");
            let text = endpoint.addresses.first()?;
            let address = problems.address(&field, text)?;
            if address.is_ipv6() != ipv6 {
                problems.tell(
                    &field,
                    &format!("{} is not of the slice's addressType {}", quoted(text), slice.address_type),
                );
                return None;
            }
            Some(object::SliceEndpoint { pod: pod(endpoint), ..slice_endpoint(address, endpoint) })
        })
        .collect();
    let last_change = last_change(&slice.metadata, &mut problems);
    Ok(Some(object::EndpointSlice {
        service: service.clone(),
        ipv6,
        ports,
        endpoints,
        problems: problems.sentences,
        last_change,
        name,
    }))
}

fn last_change(metadata: &ObjectMeta, problems: &mut Problems) -> object::LastChange {
    let annotations = metadata.annotations.as_ref();
    let text = annotations.and_then(|annotations| annotations.get(LAST_CHANGE_ANNOTATION));
    let time = text.map(|text| text.parse::<Timestamp>());
    if let (Some(text), Some(Err(_))) = (text, &time) {
        problems.tell(
            &format!("metadata.annotations[{LAST_CHANGE_ANNOTATION}]"),
            &format!("{} is not a time, so how long its changes take is not measured", quoted(text)),
        );
    }
    object::LastChange(time.and_then(Result::ok).map(SystemTime::from))
}

fn slice_endpoint(address: IpAddr, endpoint: &discovery::Endpoint) -> object::SliceEndpoint {
    let conditions = endpoint.conditions.as_ref();
    let hints = endpoint.hints.as_ref();
    let for_zones = hints.and_then(|hints| hints.for_zones.as_ref()).into_iter().flatten();
    let for_nodes = hints.and_then(|hints| hints.for_nodes.as_ref()).into_iter().flatten();
    object::SliceEndpoint {
        address,
        node_name: endpoint.node_name.as_deref().map(Into::into),
        ready: conditions.and_then(|conditions| conditions.ready).unwrap_or(true),
        serving: conditions.and_then(|conditions| conditions.serving).unwrap_or(true),
        terminating: conditions.and_then(|conditions| conditions.terminating).unwrap_or(false),
        for_zones: for_zones.map(|zone| zone.name.as_str().into()).collect(),
        for_nodes: for_nodes.map(|node| node.name.as_str().into()).collect(),
        pod: None,
    }
}

fn policy(field: &str, text: Option<&str>) -> Result<Policy, FieldError> {
    match text {
        None | Some("Cluster" | "") => Ok(Policy::Cluster),
        Some("Local") => Ok(Policy::Local),
        Some(other) => Err(unknown(field, other, "Cluster or Local")),
    }
}

/// Returns the protocol of a port; `None` for one of a newer API: the Service's other ports are
/// served all the same.
fn protocol(text: Option<&str>) -> Option<Protocol> {
    match text {
        None | Some("TCP" | "") => Some(Protocol::Tcp),
        Some("UDP") => Some(Protocol::Udp),
        Some("SCTP") => Some(Protocol::Sctp),
        Some(_) => None,
    }
}

/// Returns an optional port number; 0 if there is none.
fn optional_port(field: &str, number: Option<i32>) -> Result<u16, FieldError> {
    let number = number.unwrap_or(0);
    u16::try_from(number).map_err(|_| FieldError::new(field, format!("{number} is not a port")))
}

fn unknown(field: &str, value: &str, expected: impl fmt::Display) -> FieldError {
    FieldError::new(field, format!("unknown value {value:?}, expected {expected}"))
}
