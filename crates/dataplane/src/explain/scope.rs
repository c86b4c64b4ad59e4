//! The addresses that count as this node and its pods, from which the origin of a flow is guessed.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;

use super::flow::From;

/// The addresses of this node, and the ranges of its pods.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeScope {
    pub node: BTreeSet<IpAddr>,
    pub pods: Vec<IpNet>,
}

impl NodeScope {
    /// Guesses the origin of a flow from its source, with the reason.
    pub fn guess(&self, source: IpAddr) -> (From, String) {
        if source.is_loopback() {
            return (From::Node, format!("{source} is a loopback address"));
        }
        if self.node.contains(&source) {
            return (From::Node, format!("{source} is an address of this node"));
        }
        if let Some(range) = self.pods.iter().find(|range| range.contains(&source)) {
            return (From::Pod, format!("{source} is in {range}, the range of this node's pods"));
        }
        let pods = if self.pods.is_empty() { " (the range of its pods is not known)" } else { "" };
        (From::External, format!("{source} is an address neither of this node nor of its pods{pods}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_the_source() {
        let scope = NodeScope {
            node: ["192.0.2.1".parse().unwrap()].into(),
            pods: vec!["10.244.1.0/24".parse().unwrap()],
        };
        let guess = |text: &str| scope.guess(text.parse().unwrap()).0;
        assert_eq!(guess("192.0.2.1"), From::Node);
        assert_eq!(guess("127.3.2.1"), From::Node);
        assert_eq!(guess("::1"), From::Node);
        assert_eq!(guess("10.244.1.9"), From::Pod);
        assert_eq!(guess("10.244.2.9"), From::External, "a pod of another node");
        assert_eq!(guess("2001:db8::1"), From::External);
    }
}
