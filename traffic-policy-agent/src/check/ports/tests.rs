use traffic_policy_cluster::model::{Policy, object::Port};
use traffic_policy_dataplane::port_ranges;

use super::*;
use crate::check::{Severity, listeners::Holder};

fn facts() -> Facts {
    Facts {
        snat_ports: SnatPortRange::default(),
        ephemeral: 32_768..=60_999,
        reserved: Vec::new(),
        bound: BTreeSet::new(),
        listeners: Vec::new(),
        own: vec![
            ("0.0.0.0:10256".parse().unwrap(), "--healthz-address"),
            ("127.0.0.1:10249".parse().unwrap(), "--metrics-address"),
        ],
        services: Vec::new(),
        agent: None,
    }
}

fn listener(protocol: Protocol, local: &str, name: &str) -> Listener {
    let holder = Some(Holder { process: 7, name: name.into() });
    Listener { protocol, local: local.parse().unwrap(), holder }
}

fn complaints(facts: &Facts) -> Vec<Finding> {
    let mut findings = judge(facts);
    findings.retain(|finding| finding.severity != Severity::Ok);
    findings
}

fn expect(facts: &Facts, severity: Severity, probe: &str, found: &str, fix: &str) {
    let [finding] = complaints(facts).try_into().unwrap();
    assert_eq!((finding.severity, finding.probe), (severity, probe), "{finding:?}");
    assert!(finding.found.contains(found), "{finding:?}");
    assert!(finding.fix.as_ref().unwrap().contains(fix), "{finding:?}");
}

#[test]
fn defaults_are_fine() {
    let findings = judge(&facts());
    assert!(findings.iter().all(|finding| finding.severity == Severity::Ok), "{findings:#?}");
    assert!(findings[1].found.starts_with("33512 ports are left"), "{findings:#?}");
}

#[test]
fn the_kernels_own_ports() {
    let mut facts = facts();
    facts.ephemeral = 31_000..=60_999;
    expect(
        &facts,
        Severity::Warning,
        "local-port-range",
        "(31000 to 32767)",
        "ip_local_reserved_ports=31000-32767",
    );
    facts.reserved = port_ranges("8080,30000-32767\n");
    assert_eq!(complaints(&facts), []);
    facts.ephemeral = 3000..=65_535;
    expect(&facts, Severity::Error, "snat-ports", "only 1976 ports", "ip_local_port_range");
}

#[test]
fn ports_of_the_agent_itself() {
    let mut facts = facts();
    facts.listeners.push(listener(Protocol::Tcp, "[::]:10256", "kube-proxy"));
    expect(&facts, Severity::Error, "listener", "taken by kube-proxy (process 7)", "--healthz-address");
    facts.listeners = vec![listener(Protocol::Tcp, "127.0.0.1:10249", "traffic-policy-")];
    facts.agent = Some(7);
    expect(&facts, Severity::Note, "listener", "--metrics-address", "nothing");
    facts.agent = None;
    expect(&facts, Severity::Error, "listener", "--metrics-address", "choose another");
}

#[test]
fn listeners_on_node_ports() {
    let mut facts = facts();
    facts.listeners = vec![
        listener(Protocol::Tcp, "0.0.0.0:31000", "nginx"),
        listener(Protocol::Tcp, "[::]:31000", "nginx"),
        listener(Protocol::Tcp, "127.0.0.1:31001", "debugger"),
        listener(Protocol::Tcp, "0.0.0.0:22", "sshd"),
    ];
    expect(&facts, Severity::Note, "listener", "nginx (process 7) listens on TCP port 31000", "--node-ports");
    facts.services.push(Service {
        service_type: ServiceType::LoadBalancer,
        ipv4: true,
        ipv6: true,
        ports: vec![Port { name: String::new(), protocol: Protocol::Tcp, port: 80, node_port: 31_000 }],
        external_policy: Policy::Local,
        health_check_node_port: 32_000,
        ..Service::unserved(ServiceName { namespace: "default".into(), name: "web".into() })
    });
    expect(&facts, Severity::Warning, "listener", "the node port of Service default/web", "another nodePort");
    facts.listeners = vec![listener(Protocol::Tcp, "0.0.0.0:32000", "nginx")];
    expect(
        &facts,
        Severity::Error,
        "listener",
        "the healthCheckNodePort of Service default/web",
        "elsewhere",
    );
    // A Service of type NodePort takes the port from the annotation.
    let service = &mut facts.services[0];
    (service.service_type, service.health_check_node_port) = (ServiceType::NodePort, 0);
    service.health_annotation = 32_000;
    let named = "the traffic-policy.io/health-check-node-port of Service default/web";
    expect(&facts, Severity::Error, "listener", named, "elsewhere");
    // The same number of the other protocol is another port, and the agent itself may hold it.
    facts.listeners =
        vec![listener(Protocol::Udp, "0.0.0.0:99", "x"), listener(Protocol::Tcp, "[::]:32000", "agent")];
    facts.agent = Some(7);
    assert_eq!(complaints(&facts), []);
    // An annotation may not give this port.
    facts.services[0].health_annotation = 40_000;
    expect(
        &facts,
        Severity::Warning,
        "health-port",
        "is not within --node-ports (30000-32767)",
        "no Service has",
    );
    facts.services[0].health_annotation = 31_000;
    expect(&facts, Severity::Warning, "health-port", "is a node port of Service default/web", "--node-ports");
}
