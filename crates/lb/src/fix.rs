//! Pieces of YAML to copy.

use traffic_policy_cluster::model::object::Service;

/// Returns a spread constraint for the pod template of a Service: the numbers of pods on any two
/// nodes differ by at most one.
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

/// Returns an annotation for the Service.
pub(super) fn annotation(name: &str, value: &str) -> String {
    format!("# in the Service: metadata\nannotations:\n  {name}: {value:?}\n")
}
