//! Rules as kube-proxy writes them for a few Services, with each of its back ends, and their
//! removal as `kube-proxy --cleanup` does it. The shapes are those of pkg/proxy/iptables and
//! pkg/proxy/nftables of Kubernetes; the hashes in the names of chains are numbers here.

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::process::Command;

use anyhow::Result;

use crate::netns::Namespace;

/// The program that writes the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    Nftables,
    /// iptables with the nf_tables back end.
    IptablesNft,
    IptablesLegacy,
}

impl Backend {
    pub const ALL: [Self; 3] = [Self::Nftables, Self::IptablesNft, Self::IptablesLegacy];

    /// The program that must be installed.
    pub const fn program(self) -> &'static str {
        match self {
            Self::Nftables => "nft",
            Self::IptablesNft => "iptables-nft",
            Self::IptablesLegacy => "iptables-legacy",
        }
    }

    /// Whether this machine can use it.
    pub fn is_there(self) -> bool {
        Command::new(self.program()).arg("--version").output().is_ok_and(|output| output.status.success())
    }
}

/// A Service port of one family.
#[derive(Clone, Debug)]
pub struct Rules {
    /// The protocols, by their names in rules.
    pub protocols: &'static [&'static str],
    pub cluster_ip: SocketAddr,
    /// The address and port of a load balancer.
    pub vip: SocketAddr,
    pub node_port: u16,
    pub endpoints: Vec<SocketAddr>,
    /// Endpoints on this node, if the external traffic policy is Local.
    pub local: Option<Vec<SocketAddr>>,
}

/// Rules in a namespace, until they are cleaned.
#[derive(Debug)]
pub struct KubeProxy<'a> {
    backend: Backend,
    ipv6: bool,
    chains: Vec<String>,
    node: &'a Namespace,
}

/// The protocols of nearly all tests.
pub const TCP_AND_UDP: &[&str] = &["tcp", "udp"];

impl<'a> KubeProxy<'a> {
    /// Writes the rules. `pods` is the network of the node's pods, whose traffic to ClusterIPs is
    /// not masqueraded.
    pub fn start(
        node: &'a Namespace,
        backend: Backend,
        pods: (IpAddr, u8),
        services: &[Rules],
    ) -> Result<Self> {
        let ipv6 = pods.0.is_ipv6();
        let pods = format!("{}/{}", pods.0, pods.1);
        let mut proxy = Self { backend, ipv6, chains: Vec::new(), node };
        if backend == Backend::Nftables {
            proxy.node.feed("nft", &["-f", "-"], &nftables(ipv6, &pods, services)?)?;
        } else {
            let (text, chains) = iptables(&pods, services)?;
            proxy.chains = chains;
            proxy.node.feed(&proxy.restore(), &["--noflush"], &text)?;
        }
        Ok(proxy)
    }

    /// Removes the rules as `kube-proxy --cleanup` does: jumps first, then the chains, or the
    /// table.
    pub fn clean(self) -> Result<()> {
        if self.backend == Backend::Nftables {
            let family = if self.ipv6 { "ip6" } else { "ip" };
            return self.node.feed("nft", &["-f", "-"], &format!("delete table {family} kube-proxy\n"));
        }
        let mut text = String::from(
            "*nat\n-D PREROUTING -j KUBE-SERVICES\n-D OUTPUT -j KUBE-SERVICES\n-D POSTROUTING -j KUBE-POSTROUTING\nCOMMIT\n*nat\n",
        );
        for chain in &self.chains {
            writeln!(text, ":{chain} - [0:0]")?;
        }
        for chain in &self.chains {
            writeln!(text, "-X {chain}")?;
        }
        text += "COMMIT\n*filter\n-D FORWARD -j KUBE-FORWARD\nCOMMIT\n*filter\n:KUBE-FORWARD - [0:0]\n-X KUBE-FORWARD\nCOMMIT\n";
        self.node.feed(&self.restore(), &["--noflush"], &text)
    }

    /// The program that applies many changes at once.
    fn restore(&self) -> String {
        let kind = if self.backend == Backend::IptablesNft { "nft" } else { "legacy" };
        format!("ip{}tables-{kind}-restore", if self.ipv6 { "6" } else { "" })
    }
}

fn iptables(pods: &str, services: &[Rules]) -> Result<(String, Vec<String>)> {
    let mut chains: Vec<String> =
        ["SERVICES", "NODEPORTS", "MARK-MASQ", "POSTROUTING"].map(|name| format!("KUBE-{name}")).into();
    let mut rules = String::new();
    let w = &mut rules;
    for (number, service) in services.iter().enumerate() {
        for protocol in service.protocols {
            let id = format!("{:0<4}{number:012}", protocol.to_uppercase());
            let to = |address: SocketAddr| {
                format!("-d {} -p {protocol} -m {protocol} --dport {}", address.ip(), address.port())
            };
            writeln!(w, "-A KUBE-SERVICES {} -j KUBE-SVC-{id}", to(service.cluster_ip))?;
            writeln!(w, "-A KUBE-SERVICES {} -j KUBE-EXT-{id}", to(service.vip))?;
            writeln!(
                w,
                "-A KUBE-NODEPORTS -p {protocol} -m {protocol} --dport {} -j KUBE-EXT-{id}",
                service.node_port
            )?;
            let mut ends = vec![(format!("KUBE-SVC-{id}"), &service.endpoints)];
            if let Some(local) = &service.local {
                writeln!(w, "-A KUBE-EXT-{id} -s {pods} -j KUBE-SVC-{id}")?;
                writeln!(w, "-A KUBE-EXT-{id} -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ")?;
                writeln!(w, "-A KUBE-EXT-{id} -m addrtype --src-type LOCAL -j KUBE-SVC-{id}")?;
                writeln!(w, "-A KUBE-EXT-{id} -j KUBE-SVL-{id}")?;
                ends.push((format!("KUBE-SVL-{id}"), local));
            } else {
                writeln!(w, "-A KUBE-EXT-{id} -j KUBE-MARK-MASQ")?;
                writeln!(w, "-A KUBE-EXT-{id} -j KUBE-SVC-{id}")?;
            }
            writeln!(w, "-A KUBE-SVC-{id} ! -s {pods} {} -j KUBE-MARK-MASQ", to(service.cluster_ip))?;
            for (chain, endpoints) in ends {
                for (place, endpoint) in endpoints.iter().enumerate() {
                    let all =
                        service.endpoints.iter().position(|other| other == endpoint).unwrap_or_default();
                    let left = endpoints.len() - place;
                    let chance = if left == 1 {
                        String::new()
                    } else {
                        format!(" -m statistic --mode random --probability {:.11}", 1.0 / left as f64)
                    };
                    writeln!(w, "-A {chain}{chance} -j KUBE-SEP-{id}{all}")?;
                }
                chains.push(chain);
            }
            chains.push(format!("KUBE-EXT-{id}"));
            for (place, endpoint) in service.endpoints.iter().enumerate() {
                writeln!(w, "-A KUBE-SEP-{id}{place} -s {} -j KUBE-MARK-MASQ", endpoint.ip())?;
                writeln!(
                    w,
                    "-A KUBE-SEP-{id}{place} -p {protocol} -m {protocol} -j DNAT --to-destination {endpoint}"
                )?;
                chains.push(format!("KUBE-SEP-{id}{place}"));
            }
        }
    }
    let mut text = String::from("*nat\n");
    for chain in &chains {
        writeln!(text, ":{chain} - [0:0]")?;
    }
    text += "-A PREROUTING -j KUBE-SERVICES\n-A OUTPUT -j KUBE-SERVICES\n-A POSTROUTING -j KUBE-POSTROUTING\n\
        -A KUBE-MARK-MASQ -j MARK --or-mark 0x4000\n\
        -A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\n\
        -A KUBE-POSTROUTING -j MARK --xor-mark 0x4000\n\
        -A KUBE-POSTROUTING -j MASQUERADE --random-fully\n";
    text += &rules;
    text += "-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS\nCOMMIT\n\
        *filter\n:KUBE-FORWARD - [0:0]\n-A FORWARD -j KUBE-FORWARD\n\
        -A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP\n\
        -A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT\n\
        -A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\nCOMMIT\n";
    Ok((text, chains))
}

fn nftables(ipv6: bool, pods: &str, services: &[Rules]) -> Result<String> {
    let family = if ipv6 { "ip6" } else { "ip" };
    let mut chains = String::new();
    let (mut ips, mut ports) = (Vec::new(), Vec::new());
    for (number, service) in services.iter().enumerate() {
        for protocol in service.protocols {
            let id = format!("{number}-{protocol}");
            let key = |address: SocketAddr| format!("{} . {protocol} . {}", address.ip(), address.port());
            ips.push(format!("{} : goto service-{id}", key(service.cluster_ip)));
            ips.push(format!("{} : goto external-{id}", key(service.vip)));
            ports.push(format!("{protocol} . {} : goto external-{id}", service.node_port));
            let choose = |endpoints: &[SocketAddr]| {
                let to = endpoints.iter().enumerate().map(|(place, endpoint)| {
                    let all = service.endpoints.iter().position(|other| other == endpoint);
                    format!("{place} : goto endpoint-{id}-{}", all.unwrap_or_default())
                });
                format!(
                    "numgen random mod {} vmap {{ {} }}",
                    endpoints.len(),
                    to.collect::<Vec<_>>().join(", ")
                )
            };
            for (place, endpoint) in service.endpoints.iter().enumerate() {
                writeln!(
                    chains,
                    "chain endpoint-{id}-{place} {{\n{family} saddr {} jump mark-for-masquerade\nmeta l4proto {protocol} dnat to {endpoint}\n}}",
                    endpoint.ip()
                )?;
            }
            writeln!(
                chains,
                "chain service-{id} {{\n{family} daddr {} {family} saddr != {pods} jump mark-for-masquerade\n{}\n}}",
                service.cluster_ip.ip(),
                choose(&service.endpoints)
            )?;
            let external = match &service.local {
                None => format!("jump mark-for-masquerade\ngoto service-{id}"),
                Some(local) => format!(
                    "{family} saddr {pods} goto service-{id}\nfib saddr type local jump mark-for-masquerade\nfib saddr type local goto service-{id}\n{}",
                    choose(local)
                ),
            };
            writeln!(chains, "chain external-{id} {{\n{external}\n}}")?;
        }
    }
    let address = if ipv6 { "ipv6_addr" } else { "ipv4_addr" };
    Ok(format!(
        "table {family} kube-proxy {{
chain mark-for-masquerade {{
meta mark set meta mark or 0x4000
}}
{chains}
map service-ips {{
type {address} . inet_proto . inet_service : verdict
elements = {{ {} }}
}}
map service-nodeports {{
type inet_proto . inet_service : verdict
elements = {{ {} }}
}}
chain services {{
{family} daddr . meta l4proto . th dport vmap @service-ips
fib daddr type local meta l4proto . th dport vmap @service-nodeports
}}
chain nat-prerouting {{
type nat hook prerouting priority -100
jump services
}}
chain nat-output {{
type nat hook output priority -100
jump services
}}
chain nat-postrouting {{
type nat hook postrouting priority 100
meta mark & 0x4000 == 0 return
meta mark set meta mark xor 0x4000
masquerade fully-random
}}
}}
",
        ips.join(", "),
        ports.join(", ")
    ))
}
