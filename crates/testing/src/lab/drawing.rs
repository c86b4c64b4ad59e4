//! A drawing of a lab as text.

use std::fmt;

use super::plan;
use super::{Lab, Node};

impl fmt::Display for Lab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(cni) = self.plan.layout() {
            writeln!(f, "layout  {}", cni.name())?;
        }
        writeln!(f, "client  eth0 {}", self.client.addresses)?;
        if self.client.addresses != plan::client_on_switch() {
            writeln!(f, "  │     gateway {}", plan::client_gateway(0))?;
        }
        writeln!(f, "router  br0 {}  (no route to pods)", plan::gateway(0))?;
        if self.second_router.is_some() {
            writeln!(f, "router-2  br0 {}  (the client's eth1, node-1's eth1)", plan::gateway(1))?;
        }
        for (index, node) in self.nodes.iter().enumerate() {
            let last = index + 1 == self.nodes.len();
            let (branch, below) = if last { ("└", " ") } else { ("├", "│") };
            writeln!(f, "  {branch}── {}  eth0 {}", node.name, node.addresses)?;
            self.node_details(f, node, below)?;
        }
        Ok(())
    }
}

impl Lab {
    fn node_details(&self, f: &mut fmt::Formatter<'_>, node: &Node, below: &str) -> fmt::Result {
        if let Some(second) = node.second_uplink {
            writeln!(f, "  {below}     │  eth1 {second}  (default route)")?;
        }
        let way = match self.plan.layout() {
            Some(cni) => cni.devices(),
            None if self.is_overlay() => "cni0, flannel.1",
            None => "cni0",
        };
        let (v4, v6) = (node.pod_network.v4, node.pod_network.v6);
        writeln!(f, "  {below}     │  {way}  {v4}/{}, {v6}/{}", plan::PREFIX_V4, plan::PREFIX_V6)?;
        for (index, pod) in node.pods.iter().enumerate() {
            let branch = if index + 1 == node.pods.len() { "└" } else { "├" };
            writeln!(f, "  {below}     {branch}── {}  {}", pod.name, pod.addresses)?;
        }
        Ok(())
    }
}
