//! Network policies as plugins write them into a node's firewall: established connections are
//! accepted first, and new ones of a client to a pod are dropped.

use anyhow::Result;

use crate::lab::{Addresses, Family, Node};

/// Has a node's connections tracked from now on, as on every node whose plugin has policies: those
/// that began before would be new to a policy.
pub fn track(node: &Node) -> Result<()> {
    let rules = "table inet tracked {\n\
                   chain forward {\n\
                     type filter hook forward priority filter - 6; policy accept;\n\
                     ct state established,related accept\n\
                   }\n\
                 }\n";
    node.netns().feed("nft", &["-f", "-"], rules)
}

/// The kind of rules that a network plugin makes of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rules {
    /// A table of its own, as of kube-network-policies (kindnet).
    Nftables,
    /// A chain of a pod that FORWARD jumps to, as of kube-router and Calico.
    Iptables,
}

impl Rules {
    pub const BOTH: [Self; 2] = [Self::Nftables, Self::Iptables];

    /// Forbids new connections from `from` to `to` on a node that forwards them. Each node has one
    /// policy of each kind at most.
    pub fn forbid(self, node: &Node, from: Addresses, to: Addresses) -> Result<()> {
        match self {
            Self::Nftables => {
                let (from4, to4, from6, to6) = (from.v4, to.v4, from.v6, to.v6);
                let rules = format!(
                    "table inet policies {{\n\
                       chain forward {{\n\
                         type filter hook forward priority filter - 5; policy accept;\n\
                         ct state established,related accept\n\
                         ip saddr {from4} ip daddr {to4} drop\n\
                         ip6 saddr {from6} ip6 daddr {to6} drop\n\
                       }}\n\
                     }}\n"
                );
                node.netns().feed("nft", &["-f", "-"], &rules)
            }
            Self::Iptables => restore(node, |family| {
                let (from, to) = (from.of(family), to.of(family));
                format!(
                    "*filter\n\
                     :POLICY-POD - [0:0]\n\
                     -I FORWARD 1 -d {to} -j POLICY-POD\n\
                     -A POLICY-POD -m conntrack --ctstate RELATED,ESTABLISHED -j RETURN\n\
                     -A POLICY-POD -s {from} -j DROP\n\
                     COMMIT\n"
                )
            }),
        }
    }

    /// Takes the policy about connections to `to` back.
    pub fn allow(self, node: &Node, to: Addresses) -> Result<()> {
        match self {
            Self::Nftables => node.netns().feed("nft", &["-f", "-"], "delete table inet policies\n"),
            Self::Iptables => restore(node, |family| {
                let to = to.of(family);
                format!("*filter\n-D FORWARD -d {to} -j POLICY-POD\n-F POLICY-POD\n-X POLICY-POD\nCOMMIT\n")
            }),
        }
    }
}

fn restore(node: &Node, lines: impl Fn(Family) -> String) -> Result<()> {
    let programs = Family::BOTH.into_iter().zip(["iptables-restore", "ip6tables-restore"]);
    programs
        .into_iter()
        .try_for_each(|(family, program)| node.netns().feed(program, &["--noflush"], &lines(family)))
}
