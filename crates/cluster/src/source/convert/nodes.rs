//! Conversion of Nodes, of their announcements, and of the ranges of the whole cluster.

use std::{net::IpAddr, slice};

use k8s_openapi::api::{coordination::v1::Lease, core::v1::Node, networking::v1::ServiceCIDR};

use super::{FieldError, name, problems::Problems};
use crate::model::{Dispatch, address::parse_ip, object};

const ZONE_LABEL: &str = "topology.kubernetes.io/zone";
/// The label of a Lease by which a node takes part in direct forwarding.
pub(in crate::source) const DIRECT_LABEL: &str = "traffic-policy.io/opens";
/// Values of that label: the kind of packets that the node opens, or that it only sends some.
pub(in crate::source) const DIRECT_OPENS: &str = "ipip";
pub(in crate::source) const DIRECT_SENDS: &str = "none";
/// The annotation with the addresses of such a node, separated by commas.
pub(in crate::source) const DIRECT_ADDRESSES: &str = "traffic-policy.io/opens-from";
/// The annotation with all that such a node opens, separated by commas, the preferred one first.
/// Agents that do not know it go by the label.
pub(in crate::source) const DIRECT_DISPATCH: &str = "traffic-policy.io/opens-dispatch";
/// The annotation with the protocols of the packets that the node opens; without it, all but SCTP.
pub(in crate::source) const DIRECT_PROTOCOLS: &str = "traffic-policy.io/opens-protocols";
/// The value of that annotation in the Lease of an agent of this version.
pub(in crate::source) const OPENED_PROTOCOLS: &str = "tcp,udp,sctp";
/// The annotation with the MAC addresses of such a node's devices, separated by commas, from which
/// packets come that it sends to others as they are, and at which it takes theirs.
pub(in crate::source) const DIRECT_MACS: &str = "traffic-policy.io/opens-l2-at";
/// The annotation with its settings that decide which endpoint it finds for those.
pub(in crate::source) const DIRECT_CHOICE: &str = "traffic-policy.io/opens-l2-by";
/// The annotation by which such a node says how its replies may travel, and the value: back through
/// the node in front, if that asks for it. Agents that do not write it answer the client.
pub(in crate::source) const DIRECT_REPLY: &str = "traffic-policy.io/opens-reply";
pub(in crate::source) const DIRECT_TUNNEL: &str = "tunnel";
/// One more of its values: those of SCTP, too.
pub(in crate::source) const DIRECT_TUNNEL_SCTP: &str = "tunnel-sctp";
const TO_BE_DELETED_TAINT: &str = "ToBeDeletedByClusterAutoscaler";

pub(in crate::source) fn node(node: &Node) -> Result<object::Node, FieldError> {
    let labels = node.metadata.labels.as_ref();
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
    let listed = node.status.as_ref().and_then(|status| status.addresses.as_deref()).unwrap_or_default();
    let of_type = |wanted: &'static str| {
        listed
            .iter()
            .filter(move |address| address.type_ == wanted)
            .filter_map(|address| parse_ip(&address.address))
    };
    let mut addresses: Vec<IpAddr> = Vec::new();
    let mut all_addresses: Vec<IpAddr> = Vec::new();
    for ip in of_type("InternalIP").chain(of_type("ExternalIP")) {
        if !addresses.iter().any(|chosen| chosen.is_ipv6() == ip.is_ipv6()) {
            addresses.push(ip);
        }
        if !all_addresses.contains(&ip) {
            all_addresses.push(ip);
        }
    }
    let name = name(&node.metadata)?.name;
    let mut problems = Problems { object: format!("Node {name}"), sentences: Vec::new() };
    let spec = node.spec.as_ref();
    let pod_cidrs = match spec.and_then(|spec| spec.pod_cidrs.as_deref()) {
        Some(cidrs) if !cidrs.is_empty() => problems.cidrs("spec.podCIDRs", cidrs),
        _ => problems
            .cidrs("spec.podCIDR", spec.and_then(|spec| spec.pod_cidr.as_ref()).map_or(&[], slice::from_ref)),
    };
    Ok(object::Node {
        name,
        addresses,
        all_addresses,
        pod_cidrs,
        zone: labels.and_then(|labels| labels.get(ZONE_LABEL)).cloned(),
        leaving: node.metadata.deletion_timestamp.is_some()
            || taints.iter().any(|taint| taint.key == TO_BE_DELETED_TAINT),
        standing: object::NodeFacts::default(),
        problems: problems.sentences,
    })
}

pub(in crate::source) fn service_cidr(object: &ServiceCIDR) -> Result<object::ServiceCidr, FieldError> {
    let name = name(&object.metadata)?.name;
    let mut problems = Problems { object: format!("ServiceCIDR {name}"), sentences: Vec::new() };
    let cidrs = object.spec.as_ref().and_then(|spec| spec.cidrs.as_deref()).unwrap_or_default();
    Ok(object::ServiceCidr { cidrs: problems.cidrs("spec.cidrs", cidrs), problems: problems.sentences, name })
}

/// Converts the announcement of a node that is about to go.
pub(in crate::source) fn leaving(lease: &Lease) -> Result<object::LeavingNode, FieldError> {
    let holder = lease.spec.as_ref().and_then(|spec| spec.holder_identity.clone());
    let node = holder.filter(|node| !node.is_empty());
    let node =
        node.ok_or_else(|| FieldError::new("spec.holderIdentity", "missing: it names the leaving node"))?;
    Ok(object::LeavingNode { name: name(&lease.metadata)?, node })
}

/// Converts the Lease by which a node takes part in direct forwarding. A Lease of another kind, or
/// about packets of another kind, is `None`.
pub(in crate::source) fn direct(lease: &Lease) -> Result<Option<object::DirectNode>, FieldError> {
    let labels = lease.metadata.labels.as_ref();
    let opens = match labels.and_then(|labels| labels.get(DIRECT_LABEL)).map(String::as_str) {
        Some(DIRECT_OPENS) => true,
        Some(DIRECT_SENDS) => false,
        _ => return Ok(None),
    };
    let node = lease.spec.as_ref().and_then(|spec| spec.holder_identity.clone());
    let node = node
        .filter(|node| !node.is_empty())
        .ok_or_else(|| FieldError::new("spec.holderIdentity", "missing: it names the node"))?;
    let path = format!("metadata.annotations[{DIRECT_ADDRESSES}]");
    let annotations = lease.metadata.annotations.as_ref();
    let text = annotations
        .and_then(|annotations| annotations.get(DIRECT_ADDRESSES))
        .ok_or_else(|| FieldError::new(path.as_str(), "missing: it has the node's addresses"))?;
    // A node that has lost all of its addresses says so by an empty list.
    let addresses = text
        .split(',')
        .filter(|_| !text.is_empty())
        .map(|address| {
            parse_ip(address.trim())
                .ok_or_else(|| FieldError::new(path.as_str(), format!("{address:?} is not an IP address")))
        })
        .collect::<Result<_, _>>()?;
    let annotation = |name| annotations.and_then(|annotations| annotations.get(name));
    let words = |name| annotation(name).into_iter().flat_map(|list: &String| list.split(',')).map(str::trim);
    // What a later agent opens in addition is not known here.
    let mut dispatches: Vec<_> = words(DIRECT_DISPATCH).filter_map(Dispatch::parse).collect();
    if opens && dispatches.is_empty() {
        dispatches.push(Dispatch::Ipip);
    }
    let says_more = words(DIRECT_DISPATCH).any(|word| Dispatch::parse(word).is_none())
        || words(DIRECT_PROTOCOLS).any(|word| OPENED_PROTOCOLS.split(',').all(|known| known != word))
        || words(DIRECT_REPLY).any(|word| word != DIRECT_TUNNEL && word != DIRECT_TUNNEL_SCTP);
    let sctp = words(DIRECT_PROTOCOLS).any(|word| word == "sctp");
    let path = format!("metadata.annotations[{DIRECT_MACS}]");
    let macs = annotation(DIRECT_MACS).filter(|text| !text.is_empty()).into_iter();
    let macs = macs
        .flat_map(|text| text.split(','))
        .map(|mac| {
            mac_address(mac.trim())
                .ok_or_else(|| FieldError::new(path.as_str(), format!("{mac:?} is not a MAC address")))
        })
        .collect::<Result<_, _>>()?;
    let choice = annotation(DIRECT_CHOICE).cloned();
    let mut owners = lease.metadata.owner_references.iter().flatten();
    let owner = owners.find(|owner| owner.kind == "Node").map(|owner| owner.uid.as_str().into());
    let replies = |wanted| words(DIRECT_REPLY).any(|word| word == wanted);
    let (tunnels, tunnels_sctp) = (replies(DIRECT_TUNNEL), replies(DIRECT_TUNNEL_SCTP));
    Ok(Some(object::DirectNode {
        name: name(&lease.metadata)?,
        node,
        opens,
        dispatches,
        sctp,
        tunnels,
        tunnels_sctp,
        addresses,
        macs,
        choice,
        says_more,
        owner,
    }))
}

/// Parses six pairs of hexadecimal digits, separated by colons.
fn mac_address(text: &str) -> Option<[u8; 6]> {
    let bytes: Vec<u8> = text
        .split(':')
        .map(|pair| u8::from_str_radix(pair, 16).ok().filter(|_| pair.len() == 2))
        .collect::<Option<_>>()?;
    bytes.try_into().ok()
}
