//! Rules as kube-proxy in its mode `nftables` writes them: chains, hooks, priorities and maps are
//! those of
//! <https://github.com/kubernetes/kubernetes/blob/81810de635aa13aa0a32992f6def3aa9d6025ebc/pkg/proxy/nftables/proxier_test.go>
//! (`baseRules`, and the Service with a node port below it).

use std::fmt::{self, Write as _};

use super::super::{
    fixture::NODE,
    generator::TARGET_PORT,
    services::{CLUSTER, CLUSTER_IPS, PORT, Service},
};

/// All rules except those of Services.
const BASE: &str = r#"
chain filter-prerouting-pre-dnat {
    type filter hook prerouting priority -110;
    ct state new jump firewall-check
}
chain filter-output-pre-dnat {
    type filter hook output priority -110;
    ct state new jump firewall-check
}
chain filter-forward {
    type filter hook forward priority 0;
    ct state new jump service-endpoints-check
    ct state new jump cluster-ips-check
}
chain filter-input {
    type filter hook input priority 0;
    ct state new jump nodeport-endpoints-check
    ct state new jump service-endpoints-check
}
chain filter-output {
    type filter hook output priority 0;
    ct state new jump service-endpoints-check
    ct state new jump cluster-ips-check
}
chain nat-prerouting {
    type nat hook prerouting priority -100;
    jump services
}
chain nat-output {
    type nat hook output priority -100;
    jump services
}
chain nat-postrouting {
    type nat hook postrouting priority 100;
    jump masquerading
}
chain firewall-check {
    ip daddr . meta l4proto . th dport vmap @firewall-ips
}
chain nodeport-endpoints-check {
    ip daddr @nodeport-ips meta l4proto . th dport vmap @no-endpoint-nodeports
}
chain service-endpoints-check {
    ip daddr . meta l4proto . th dport vmap @no-endpoint-services
}
chain services {
    ip daddr . meta l4proto . th dport vmap @service-ips
    ip daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports
}
chain mark-for-masquerade {
    mark set mark or 0x4000
}
chain masquerading {
    mark and 0x4000 == 0 return
    mark set mark xor 0x4000
    masquerade fully-random
}
chain reject-chain {
    reject
}
"#;

/// Returns the rules for `nft -f`.
pub(crate) fn rules(services: &[Service]) -> String {
    let mut text = String::new();
    // Writing into a String does not fail.
    let _ = write(&mut text, services);
    text
}

fn write(text: &mut String, services: &[Service]) -> fmt::Result {
    let (mut cluster_ips, mut ips, mut node_ports) = (Vec::new(), Vec::new(), Vec::new());
    let mut chains = String::new();
    for (i, service) in services.iter().enumerate() {
        let name = format!("{i:08}-default/{}/tcp/tcp-{PORT}", service.name);
        cluster_ips.push(service.cluster_ip.to_string());
        ips.push(format!("{} . tcp . {PORT} : goto service-{name}", service.cluster_ip));
        if let Some(node_port) = service.node_port {
            node_ports.push(format!("tcp . {node_port} : goto external-{name}"));
        }
        let endpoint = |address| format!("endpoint-{name}__{address}/{TARGET_PORT}");
        for address in &service.endpoints {
            writeln!(chains, "chain {} {{", endpoint(address))?;
            writeln!(chains, "    ip saddr {address} jump mark-for-masquerade")?;
            writeln!(chains, "    meta l4proto tcp dnat to {address}:{TARGET_PORT}\n}}")?;
        }
        let choice = service.endpoints.iter().enumerate().map(|(i, a)| format!("{i} : goto {}", endpoint(a)));
        let choice: Vec<_> = choice.collect();
        writeln!(chains, "chain service-{name} {{")?;
        writeln!(
            chains,
            "    ip daddr {} tcp dport {PORT} ip saddr != {CLUSTER} jump mark-for-masquerade",
            service.cluster_ip
        )?;
        writeln!(chains, "    numgen random mod {} vmap {{ {} }}\n}}", choice.len(), choice.join(", "))?;
        if service.node_port.is_some() {
            writeln!(
                chains,
                "chain external-{name} {{\n    jump mark-for-masquerade\n    goto service-{name}\n}}"
            )?;
        }
    }
    writeln!(text, "table ip kube-proxy {{")?;
    writeln!(text, "set cluster-ips {{ type ipv4_addr; elements = {{ {} }} }}", cluster_ips.join(", "))?;
    writeln!(text, "set nodeport-ips {{ type ipv4_addr; elements = {{ {NODE} }} }}")?;
    let (by_address, by_port) = ("ipv4_addr . inet_proto . inet_service", "inet_proto . inet_service");
    for (name, key) in [
        ("firewall-ips", by_address),
        ("no-endpoint-services", by_address),
        ("no-endpoint-nodeports", by_port),
    ] {
        writeln!(text, "map {name} {{ type {key} : verdict; }}")?;
    }
    writeln!(text, "{chains}")?;
    for (name, key, elements) in
        [("service-ips", by_address, ips), ("service-nodeports", by_port, node_ports)]
    {
        writeln!(text, "map {name} {{ type {key} : verdict; elements = {{ {} }} }}", elements.join(", "))?;
    }
    writeln!(text, "chain cluster-ips-check {{\n    ip daddr @cluster-ips reject")?;
    writeln!(text, "    ip daddr {{ {CLUSTER_IPS} }} drop\n}}")?;
    writeln!(text, "{BASE}}}")
}
