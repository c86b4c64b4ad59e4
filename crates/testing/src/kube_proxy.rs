//! Rules as kube-proxy writes them for a few Services, with each of its back ends, and their
//! removal as `kube-proxy --cleanup` does it. The hashes in the names of chains are numbers here.

mod iptables;
mod nftables;

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::process::Command;

use anyhow::Result;

use crate::lab::{Family, Node};
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

    /// The rules of a node, as its program reads them: `nft -f`, or `iptables-restore`.
    pub fn rules(self, place: &Place, services: &[Rules]) -> String {
        let mut text = String::new();
        let written = match self {
            Self::Nftables => nftables::write(&mut text, place, services),
            Self::IptablesNft | Self::IptablesLegacy => iptables::write(&mut text, place, services),
        };
        written.expect("writing into a String does not fail");
        text
    }
}

/// A node, as its rules name it.
#[derive(Clone, Debug)]
pub struct Place {
    /// The address of node ports.
    pub node: IpAddr,
    /// The network of the pods, whose traffic to ClusterIPs is not masqueraded.
    pub pods: String,
    /// The network of ClusterIPs.
    pub cluster_ips: &'static str,
}

/// A Service port of one family, in the namespace `default`.
#[derive(Clone, Debug)]
pub struct Rules {
    pub name: String,
    /// The protocols, by their names in rules.
    pub protocols: Vec<&'static str>,
    pub cluster_ip: SocketAddr,
    /// The address and port of a load balancer.
    pub vip: Option<SocketAddr>,
    pub node_port: Option<u16>,
    pub endpoints: Vec<SocketAddr>,
    /// Endpoints on this node, if the external traffic policy is Local.
    pub local: Option<Vec<SocketAddr>>,
}

impl Rules {
    /// Whether clients outside of the cluster have an address for it.
    fn is_external(&self) -> bool {
        self.vip.is_some() || self.node_port.is_some()
    }

    /// The place of an endpoint among all.
    fn place_of(&self, endpoint: &SocketAddr) -> usize {
        self.endpoints.iter().position(|other| other == endpoint).expect("a local endpoint is one of all")
    }
}

/// The Service ports with their protocols: each has chains of its own.
fn ports(services: &[Rules]) -> impl Iterator<Item = (usize, &Rules, &'static str)> {
    let ports =
        services.iter().flat_map(|service| service.protocols.iter().map(move |name| (service, *name)));
    ports.enumerate().map(|(number, (service, protocol))| (number, service, protocol))
}

/// Rules in a namespace, until they are cleaned.
#[derive(Debug)]
pub struct KubeProxy<'a> {
    backend: Backend,
    family: Family,
    rules: String,
    node: &'a Namespace,
}

/// The protocols of nearly all tests.
pub const TCP_AND_UDP: &[&str] = &["tcp", "udp"];

impl<'a> KubeProxy<'a> {
    /// Writes the rules.
    pub fn start(node: &'a Node, family: Family, backend: Backend, services: &[Rules]) -> Result<Self> {
        let place = Place {
            node: node.address(family),
            pods: format!("{}/{}", node.pod_network.of(family), family.prefix()),
            cluster_ips: if family == Family::V4 { "10.96.0.0/12" } else { "fd00:10:96::/112" },
        };
        let proxy = Self { backend, family, rules: backend.rules(&place, services), node: node.netns() };
        proxy.feed(&proxy.rules)?;
        Ok(proxy)
    }

    /// Removes the rules as `kube-proxy --cleanup` does: jumps first, then the chains, or the
    /// table.
    pub fn clean(self) -> Result<()> {
        if self.backend == Backend::Nftables {
            let family = if self.family == Family::V4 { "ip" } else { "ip6" };
            return self.feed(&format!("delete table {family} kube-proxy\n"));
        }
        let mut text = String::new();
        for table in self.rules.split_terminator("COMMIT\n") {
            let name = table.lines().next().unwrap_or_default();
            writeln!(text, "{name}")?;
            for rule in table.lines().filter(|line| line.starts_with("-A") && !line.starts_with("-A KUBE-")) {
                writeln!(text, "{}", rule.replacen("-A", "-D", 1))?;
            }
            let chains = table.lines().filter_map(|line| line.strip_prefix(':'));
            let chains: Vec<_> = chains.filter_map(|line| line.split(' ').next()).collect();
            writeln!(text, "COMMIT\n{name}")?;
            chains.iter().try_for_each(|chain| writeln!(text, ":{chain} - [0:0]"))?;
            chains.iter().try_for_each(|chain| writeln!(text, "-X {chain}"))?;
            writeln!(text, "COMMIT")?;
        }
        self.feed(&text)
    }

    /// Applies many changes at once.
    fn feed(&self, text: &str) -> Result<()> {
        let ipv6 = if self.family == Family::V4 { "" } else { "6" };
        match self.backend {
            Backend::Nftables => self.node.feed("nft", &["-f", "-"], text),
            Backend::IptablesNft => {
                self.node.feed(&format!("ip{ipv6}tables-nft-restore"), &["--noflush"], text)
            }
            Backend::IptablesLegacy => {
                self.node.feed(&format!("ip{ipv6}tables-legacy-restore"), &["--noflush"], text)
            }
        }
    }
}
