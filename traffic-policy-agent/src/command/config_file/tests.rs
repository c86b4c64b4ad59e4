//! Files as kubeadm and users write them, and malformed ones.

use std::io::Write as _;

use super::*;

const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

fn parsed(fields: &str) -> Result<Parsed, String> {
    parse(&format!("{HEAD}{fields}"))
}

fn values(fields: &str) -> Vec<(&'static str, String)> {
    parsed(fields).unwrap().0
}

/// Returns messages without those about node ports.
fn notes(fields: &str) -> Vec<String> {
    let notes = parsed(fields).unwrap().1;
    notes.into_iter().filter(|note| *note != Note::NodePorts).map(|note| note.to_string()).collect()
}

/// The file contains all fields; most are null or empty, which requests nothing.
#[test]
fn kubeadms_file_as_it_is() {
    let (values, notes) = parse(include_str!("kubeadm.yaml")).unwrap();
    assert_eq!(values, [("kubeconfig", "/var/lib/kube-proxy/kubeconfig.conf".to_owned())]);
    let said: Vec<_> = notes.iter().map(ToString::to_string).collect();
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(said[0].starts_with("clusterCIDR: \"10.244.0.0/16\" is not applied: "), "{said:?}");
    assert!(said[1].starts_with("nodePortAddresses is not set: "), "{said:?}");
}

#[test]
fn what_applies_is_read() {
    let fields = "hostnameOverride: ' Node-1 '\nhealthzBindAddress: 192.0.2.1\nmetricsBindAddress: '[::1]:9000'\n\
                  nodePortAddresses: [192.0.2.0/24, 2001:db8::/64]\n\
                  conntrack: {tcpEstablishedTimeout: 2h0m0s, tcpCloseWaitTimeout: 30m, udpTimeout: 10s, udpStreamTimeout: 90s}\n\
                  logging: {verbosity: 4, format: json}\n";
    let expected = [
        ("node_name", "node-1"),
        ("healthz_address", "192.0.2.1:10256"),
        ("metrics_address", "[::1]:9000"),
        ("node_port_addresses", "192.0.2.0/24,2001:db8::/64"),
        ("idle_established", "2h0m0s"),
        ("idle_half_closed", "30m"),
        ("idle_udp", "10s"),
        ("idle_udp_answered", "90s"),
        ("log", "debug"),
        ("log_format", "json"),
    ];
    assert_eq!(values(fields), expected.map(|(id, value)| (id, value.to_owned())));
    assert_eq!(notes(fields), [""; 0]);
    assert_eq!(values("healthzBindAddress: '::'"), [("healthz_address", "[::]:10256".to_owned())]);
    for (verbosity, level) in [(1, "info"), (3, "info"), (5, "debug"), (6, "trace"), (10, "trace")] {
        assert_eq!(values(&format!("logging: {{verbosity: {verbosity}}}")), [("log", level.to_owned())]);
    }
    // JSON is valid YAML.
    let json =
        format!("{{\"apiVersion\": {API_VERSION:?}, \"kind\": {KIND:?}, \"hostnameOverride\": \"n\"}}");
    assert_eq!(parse(&json).unwrap().0, [("node_name", "n".to_owned())]);
}

#[test]
fn what_does_not_apply_is_named_once_with_why() {
    for (fields, expected) in [
        (
            "mode: iptables",
            "mode: \"iptables\" is not applied: packets are served by XDP, TC and socket programs",
        ),
        ("iptables: {masqueradeAll: true}", "iptables.masqueradeAll: true is not applied: the source"),
        (
            "iptables: {localhostNodePorts: false}",
            "iptables.localhostNodePorts: false is not applied: --node-port",
        ),
        (
            "conntrack: {maxPerCore: 32768}",
            "conntrack.maxPerCore: 32768 is not applied: there is no conntrack",
        ),
        ("featureGates: {KubeProxyDrainingTerminatingNodes: true}", "featureGates: {\"KubeProxyDraining"),
        ("oomScoreAdj: -999", "oomScoreAdj: -999 is not applied: it takes CAP_SYS_RESOURCE"),
        ("ipvs: {scheduler: lc}", "ipvs.scheduler: \"lc\" is not applied"),
        ("bindAddress: 192.0.2.1", "bindAddress: \"192.0.2.1\" is not applied"),
    ] {
        let notes = notes(fields);
        assert_eq!(notes.len(), 1, "{fields}: {notes:?}");
        assert!(notes[0].starts_with(expected), "{fields}: {notes:?}");
        assert_eq!(values(fields), []);
    }
    for ordinary in [
        "iptables: {localhostNodePorts: true, minSyncPeriod: 1s}",
        "bindAddress: '::'",
        "logging: {flushFrequency: 5s}",
        "iptables: null",
        "featureGates: {}",
        "conntrack: {maxPerCore: 0}",
    ] {
        assert_eq!(notes(ordinary), [""; 0], "{ordinary}");
    }
    let node_ports = |fields| parsed(fields).unwrap().1.contains(&Note::NodePorts);
    assert!(node_ports("mode: iptables"));
    assert!(!node_ports("mode: nftables"));
    assert!(!node_ports("nodePortAddresses: [all]"));
}

#[test]
fn unknown_fields_are_named_with_what_may_be_meant() {
    for (fields, expected) in [
        (
            "conntrack: {tcpEstablishedTimout: 1h}",
            "conntrack.tcpEstablishedTimout is unknown, and ignored: is conntrack.tcpEstablishedTimeout meant?",
        ),
        ("hostNameOverride: n", "hostNameOverride is unknown, and ignored: is hostnameOverride meant?"),
        ("kubeconfig: /x", "kubeconfig is unknown, and ignored: is clientConnection.kubeconfig meant?"),
        ("zzz: 1", "zzz is unknown, and ignored"),
        ("1: 2", "1 is unknown, and ignored"),
    ] {
        assert_eq!(notes(fields), [expected], "{fields}");
        assert_eq!(values(fields), [], "{fields}");
    }
}

#[test]
fn a_wrong_value_is_named_with_the_field_and_what_to_write() {
    for (fields, texts) in [
        ("healthzBindAddress: here", ["healthzBindAddress is \"here\"", "0.0.0.0:10256"]),
        ("healthzBindAddress: 10256", ["healthzBindAddress is 10256", "0.0.0.0:10256"]),
        ("metricsBindAddress: 1.2.3.4:99999", ["metricsBindAddress is \"1.2.3.4:99999\"", "0.0.0.0:10249"]),
        ("conntrack: {udpTimeout: soon}", ["conntrack.udpTimeout is \"soon\"", "30s, 2m or 24h0m0s"]),
        ("conntrack: {udpTimeout: -5s}", ["conntrack.udpTimeout is \"-5s\"", "30s, 2m or 24h0m0s"]),
        ("conntrack: {udpTimeout: 5}", ["conntrack.udpTimeout is 5", "a time in quotes"]),
        ("conntrack: 5", ["conntrack is 5", "write a mapping"]),
        ("nodePortAddresses: all", ["nodePortAddresses is \"all\"", "a list of CIDRs"]),
        (
            "nodePortAddresses: [192.0.2.300/24]",
            ["nodePortAddresses is [\"192.0.2.300/24\"]", "192.0.2.0/24"],
        ),
        ("nodePortAddresses: ['192.0.2.0/24,all']", ["nodePortAddresses is", "a list of CIDRs"]),
        ("hostnameOverride: [n]", ["hostnameOverride is [\"n\"]", "Node object"]),
        ("logging: {verbosity: -1}", ["logging.verbosity is -1", "a number from 0"]),
        ("logging: {format: xml}", ["logging.format is \"xml\"", "text or json"]),
        ("a: 1\n b: 2", ["line 4", "one YAML document of kind KubeProxyConfiguration"]),
        ("mode: a\nmode: b", ["duplicate", "one YAML document"]),
    ] {
        let error = parsed(fields).unwrap_err();
        for text in texts {
            assert!(error.contains(text), "{fields}: no {text:?} in {error:?}");
        }
    }
}

#[test]
fn another_kind_of_file() {
    for (text, expected) in [
        ("apiVersion: v1\nkind: ConfigMap\ndata: {config.conf: ''}", "give what it has as config.conf"),
        ("apiVersion: v1\nkind: Pod", "apiVersion \"v1\", kind \"Pod\" is not what --config takes"),
        (
            "mode: iptables",
            "write apiVersion: kubeproxy.config.k8s.io/v1alpha1, kind: KubeProxyConfiguration",
        ),
        ("", "no YAML mapping"),
        ("- a", "no YAML mapping"),
    ] {
        let error = parse(text).unwrap_err();
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn errors_name_the_file() {
    let missing = read(Path::new("/nowhere/config.conf")).unwrap_err().to_string();
    assert!(missing.starts_with("/nowhere/config.conf: No such file"), "{missing}");
    let mut file = tempfile::NamedTempFile::new().unwrap();
    write!(file, "{HEAD}conntrack: {{udpTimeout: x}}").unwrap();
    let wrong = read(file.path()).unwrap_err().to_string();
    assert!(wrong.starts_with(&format!("{}: conntrack.udpTimeout is", file.path().display())), "{wrong}");
}

/// A field that names an unknown flag would be ignored silently.
#[test]
fn fields_name_flags_that_are_there() {
    use clap::CommandFactory as _;
    let mut program = super::super::Arguments::command();
    program.build();
    let run = program.find_subcommand("run").unwrap();
    for field in FIELDS {
        if let Meaning::Flag(id, _) = field.meaning {
            assert!(run.get_arguments().any(|argument| argument.get_id() == id), "{}: {id}", field.path);
        }
        let same = FIELDS.iter().filter(|other| other.path == field.path).count();
        assert_eq!(same, 1, "{}", field.path);
    }
}
