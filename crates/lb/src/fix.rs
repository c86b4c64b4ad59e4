//! Pieces of YAML to paste.

use traffic_policy_cluster::model::object::Service;

/// For the pod template of a Service's pods: as many on each node as on any other, give or take one.
pub(super) fn spread(service: &Service) -> String {
    let mut text = String::from(
        "# in the pod template: spec.template.spec\ntopologySpreadConstraints:\n- maxSkew: 1\n  topologyKey: kubernetes.io/hostname\n  whenUnsatisfiable: ScheduleAnyway\n  labelSelector:\n    matchLabels:\n",
    );
    let selector = service.signs.as_ref().map(|signs| signs.selector.as_slice()).unwrap_or_default();
    if selector.is_empty() {
        text.push_str("      app: NAME  # the labels of the pods\n");
    }
    for (name, value) in selector {
        text.push_str(&format!("      {name}: {value:?}\n"));
    }
    text
}

/// For the Service: an annotation.
pub(super) fn annotation(name: &str, value: &str) -> String {
    format!("# in the Service: metadata\nannotations:\n  {name}: {value:?}\n")
}
