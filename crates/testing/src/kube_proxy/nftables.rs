//! Rules as kube-proxy in its mode `nftables` writes them: chains, hooks, priorities and maps are
//! those of
//! <https://github.com/kubernetes/kubernetes/blob/81810de635aa13aa0a32992f6def3aa9d6025ebc/pkg/proxy/nftables/proxier_test.go>
//! (`baseRules`, and the Service with a node port below it).

use std::fmt::{Result, Write as _};
use std::net::SocketAddr;

use super::{Place, Rules, ports};

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

pub(super) fn write(text: &mut String, place: &Place, services: &[Rules]) -> Result {
    let ip = if place.node.is_ipv4() { "ip" } else { "ip6" };
    let pods = &place.pods;
    let (mut cluster_ips, mut ips, mut node_ports) = (Vec::new(), Vec::new(), Vec::new());
    let mut chains = String::new();
    for (i, service, protocol) in ports(services) {
        let (cluster_ip, port) = (service.cluster_ip.ip(), service.cluster_ip.port());
        let name = format!("{i:08}-default/{}/{protocol}/{protocol}-{port}", service.name);
        cluster_ips.push(cluster_ip.to_string());
        ips.push(format!("{cluster_ip} . {protocol} . {port} : goto service-{name}"));
        if let Some(vip) = service.vip {
            ips.push(format!("{} . {protocol} . {} : goto external-{name}", vip.ip(), vip.port()));
        }
        if let Some(node_port) = service.node_port {
            node_ports.push(format!("{protocol} . {node_port} : goto external-{name}"));
        }
        let endpoint = |to: &SocketAddr| {
            // No name has a colon.
            format!("endpoint-{name}__{}/{}", to.ip().to_string().replace(':', "."), to.port())
        };
        let choose = |endpoints: &[SocketAddr]| {
            let to = endpoints.iter().enumerate().map(|(j, to)| format!("{j} : goto {}", endpoint(to)));
            let to = to.collect::<Vec<_>>().join(", ");
            format!("    numgen random mod {} vmap {{ {to} }}", endpoints.len())
        };
        for to in &service.endpoints {
            writeln!(chains, "chain {} {{", endpoint(to))?;
            writeln!(chains, "    {ip} saddr {} jump mark-for-masquerade", to.ip())?;
            writeln!(chains, "    meta l4proto {protocol} dnat to {to}\n}}")?;
        }
        writeln!(chains, "chain service-{name} {{")?;
        writeln!(
            chains,
            "    {ip} daddr {cluster_ip} {protocol} dport {port} {ip} saddr != {pods} jump mark-for-masquerade"
        )?;
        writeln!(chains, "{}\n}}", choose(&service.endpoints))?;
        if service.is_external() {
            writeln!(chains, "chain external-{name} {{")?;
            if let Some(local) = &service.local {
                writeln!(chains, "    {ip} saddr {pods} goto service-{name}")?;
                writeln!(chains, "    fib saddr type local jump mark-for-masquerade")?;
                writeln!(chains, "    fib saddr type local goto service-{name}")?;
                writeln!(chains, "{}\n}}", choose(local))?;
            } else {
                writeln!(chains, "    jump mark-for-masquerade\n    goto service-{name}\n}}")?;
            }
        }
    }
    // The protocols of a Service share its address.
    cluster_ips.dedup();
    let address = if ip == "ip" { "ipv4_addr" } else { "ipv6_addr" };
    let (by_address, by_port) =
        (&*format!("{address} . inet_proto . inet_service"), "inet_proto . inet_service");
    writeln!(text, "table {ip} kube-proxy {{")?;
    writeln!(text, "set cluster-ips {{ type {address}; elements = {{ {} }} }}", cluster_ips.join(", "))?;
    writeln!(text, "set nodeport-ips {{ type {address}; elements = {{ {} }} }}", place.node)?;
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

    writeln!(text, "chain cluster-ips-check {{\n    {ip} daddr @cluster-ips reject")?;
    writeln!(text, "    {ip} daddr {{ {} }} drop\n}}", place.cluster_ips)?;
    writeln!(text, "{}}}", BASE.replace("ip daddr", &format!("{ip} daddr")))
}
