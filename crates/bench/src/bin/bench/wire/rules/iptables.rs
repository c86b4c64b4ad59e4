//! Rules as kube-proxy in its mode `iptables` writes them (pkg/proxy/iptables/proxier.go of
//! Kubernetes): one list of all ClusterIPs, with node ports as its last rule. Its counters of
//! dropped packets (nfacct) are left out.

use std::fmt::{self, Write as _};

use super::super::{
    generator::TARGET_PORT,
    services::{CLUSTER, PORT, Service},
};

const FILTER: &str = r#"*filter
:KUBE-EXTERNAL-SERVICES - [0:0]
:KUBE-FIREWALL - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SERVICES - [0:0]
-A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-A INPUT -m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS
-A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-A INPUT -j KUBE-FIREWALL
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-A OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-A OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -j KUBE-FIREWALL
-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "block incoming localnet connections" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
"#;

const NAT: &str = r#"-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
"#;

/// Returns the rules for `iptables-restore`.
pub(crate) fn rules(services: &[Service]) -> String {
    let mut text = String::from(FILTER);
    // Writing into a String does not fail.
    let _ = write(&mut text, services);
    text
}

fn write(text: &mut String, services: &[Service]) -> fmt::Result {
    writeln!(text, "*nat")?;
    for chain in ["SERVICES", "NODEPORTS", "MARK-MASQ", "POSTROUTING"] {
        writeln!(text, ":KUBE-{chain} - [0:0]")?;
    }
    let mut rules = String::new();
    for (i, service) in services.iter().enumerate() {
        // The names are as long as the real ones, which end in a hash.
        let (id, about) = (format!("{i:016}"), format!("default/{}:tcp-{PORT}", service.name));
        let port = format!("-p tcp -m comment --comment \"{about} cluster IP\" -m tcp --dport {PORT}");
        writeln!(text, ":KUBE-SVC-{id} - [0:0]")?;
        writeln!(rules, "-A KUBE-SERVICES -d {}/32 {port} -j KUBE-SVC-{id}", service.cluster_ip)?;
        if let Some(node_port) = service.node_port {
            writeln!(text, ":KUBE-EXT-{id} - [0:0]")?;
            writeln!(
                rules,
                "-A KUBE-NODEPORTS -p tcp -m comment --comment \"{about}\" -m tcp --dport {node_port} -j KUBE-EXT-{id}"
            )?;
            writeln!(
                rules,
                "-A KUBE-EXT-{id} -m comment --comment \"masquerade traffic for {about} external destinations\" -j KUBE-MARK-MASQ"
            )?;
            writeln!(rules, "-A KUBE-EXT-{id} -j KUBE-SVC-{id}")?;
        }
        writeln!(
            rules,
            "-A KUBE-SVC-{id} ! -s {CLUSTER} -d {}/32 {port} -j KUBE-MARK-MASQ",
            service.cluster_ip
        )?;
        let left = service.endpoints.len();
        for (j, address) in service.endpoints.iter().enumerate() {
            let endpoint = format!("KUBE-SEP-{:016}", i * 16 + j);
            writeln!(text, ":{endpoint} - [0:0]")?;
            let chance = match left - j {
                1 => String::new(),
                left => format!(" -m statistic --mode random --probability {:.11}", 1.0 / left as f64),
            };
            let to = format!("{address}:{TARGET_PORT}");
            writeln!(
                rules,
                "-A KUBE-SVC-{id} -m comment --comment \"{about} -> {to}\"{chance} -j {endpoint}"
            )?;
            writeln!(
                rules,
                "-A {endpoint} -s {address}/32 -m comment --comment \"{about}\" -j KUBE-MARK-MASQ"
            )?;
            writeln!(
                rules,
                "-A {endpoint} -p tcp -m comment --comment \"{about}\" -m tcp -j DNAT --to-destination {to}"
            )?;
        }
    }
    writeln!(
        rules,
        "-A KUBE-SERVICES -m comment --comment \"kubernetes service nodeports; NOTE: this must be the last rule in this chain\" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS"
    )?;
    writeln!(text, "{NAT}{rules}COMMIT")
}
