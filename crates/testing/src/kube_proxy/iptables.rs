//! Rules as kube-proxy in its mode `iptables` writes them (pkg/proxy/iptables/proxier.go of
//! Kubernetes): one list of all ClusterIPs, with node ports as its last rule. Its counters of
//! dropped packets (nfacct) are left out.

use std::fmt::{Result, Write as _};
use std::net::SocketAddr;

use super::{Place, Rules, ports};

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

pub(super) fn write(text: &mut String, place: &Place, services: &[Rules]) -> Result {
    let (is_ipv4, pods) = (place.node.is_ipv4(), &place.pods);
    // Of IPv6 no network belongs to the loopback device.
    for line in FILTER.lines().filter(|line| is_ipv4 || !line.contains("localnet")) {
        writeln!(text, "{line}")?;
    }
    writeln!(text, "*nat")?;
    for chain in ["SERVICES", "NODEPORTS", "MARK-MASQ", "POSTROUTING"] {
        writeln!(text, ":KUBE-{chain} - [0:0]")?;
    }
    let length = if is_ipv4 { 32 } else { 128 };
    let mut rules = String::new();
    for (i, service, protocol) in ports(services) {
        // The names are as long as the real ones, which end in a hash.
        let id = format!("{i:016}");
        let about = format!("default/{}:{protocol}-{}", service.name, service.cluster_ip.port());
        let to = |to: SocketAddr, what: &str| {
            let comment = format!("-m comment --comment \"{about} {what}\"");
            format!("-d {}/{length} -p {protocol} {comment} -m {protocol} --dport {}", to.ip(), to.port())
        };
        let cluster_ip = to(service.cluster_ip, "cluster IP");
        writeln!(text, ":KUBE-SVC-{id} - [0:0]")?;
        writeln!(rules, "-A KUBE-SERVICES {cluster_ip} -j KUBE-SVC-{id}")?;
        if let Some(vip) = service.vip {
            writeln!(rules, "-A KUBE-SERVICES {} -j KUBE-EXT-{id}", to(vip, "loadbalancer IP"))?;
        }
        if let Some(node_port) = service.node_port {
            writeln!(
                rules,
                "-A KUBE-NODEPORTS -p {protocol} -m comment --comment \"{about}\" -m {protocol} --dport {node_port} -j KUBE-EXT-{id}"
            )?;
        }
        if service.is_external() {
            writeln!(text, ":KUBE-EXT-{id} - [0:0]")?;
            let mut external = |condition: &str, what: &str, target: &str| {
                let about = format!("{what} for {about} external destinations");
                writeln!(
                    rules,
                    "-A KUBE-EXT-{id}{condition} -m comment --comment \"{about}\" -j KUBE-{target}"
                )
            };
            if service.local.is_some() {
                let (service, from_here) = (format!("SVC-{id}"), " -m addrtype --src-type LOCAL");
                external(&format!(" -s {pods}"), "pod traffic", &service)?;
                external(from_here, "masquerade LOCAL traffic", "MARK-MASQ")?;
                external(from_here, "route LOCAL traffic", &service)?;
                writeln!(text, ":KUBE-SVL-{id} - [0:0]")?;
                writeln!(rules, "-A KUBE-EXT-{id} -j KUBE-SVL-{id}")?;
            } else {
                external("", "masquerade traffic", "MARK-MASQ")?;
                writeln!(rules, "-A KUBE-EXT-{id} -j KUBE-SVC-{id}")?;
            }
        }
        writeln!(rules, "-A KUBE-SVC-{id} ! -s {pods} {cluster_ip} -j KUBE-MARK-MASQ")?;
        let endpoint = |to: &SocketAddr| format!("KUBE-SEP-{:016}", i * 16 + service.place_of(to));
        let choose = |chain: &str, endpoints: &[SocketAddr], j: usize| {
            let (to, left) = (&endpoints[j], endpoints.len() - j);
            let chance = match left {
                1 => String::new(),
                left => format!(" -m statistic --mode random --probability {:.11}", 1.0 / left as f64),
            };
            let comment = format!("-m comment --comment \"{about} -> {to}\"");
            format!("-A KUBE-{chain}-{id} {comment}{chance} -j {}", endpoint(to))
        };
        for (j, to) in service.endpoints.iter().enumerate() {
            let (name, address) = (endpoint(to), to.ip());
            writeln!(text, ":{name} - [0:0]")?;
            writeln!(rules, "{}", choose("SVC", &service.endpoints, j))?;
            writeln!(
                rules,
                "-A {name} -s {address}/{length} -m comment --comment \"{about}\" -j KUBE-MARK-MASQ"
            )?;
            writeln!(
                rules,
                "-A {name} -p {protocol} -m comment --comment \"{about}\" -m {protocol} -j DNAT --to-destination {to}"
            )?;
        }
        let local = service.local.as_deref().unwrap_or_default();
        (0..local.len()).try_for_each(|j| writeln!(rules, "{}", choose("SVL", local, j)))?;
    }
    writeln!(
        rules,
        "-A KUBE-SERVICES -m comment --comment \"kubernetes service nodeports; NOTE: this must be the last rule in this chain\" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS"
    )?;
    writeln!(text, "{NAT}{rules}COMMIT")
}
