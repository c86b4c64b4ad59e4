//! The shares of endpoints in a Maglev table, as the annotation of a Service demands.

use std::{
    collections::{BTreeMap, BTreeSet},
    str::FromStr,
};

/// The annotation that sets the [`Weights`] of a Service.
pub const WEIGHT_ANNOTATION: &str = "traffic-policy.io/weight";

/// The largest weight. A table is filled in rounds, and what one costs grows with the ratio of the
/// largest weight to the mean of all.
pub const LARGEST: u16 = 1_000;

/// The weights of a Service's endpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Weights {
    /// Every endpoint has the same share.
    #[default]
    Endpoints,
    /// Every node has the same share, whatever the number of its endpoints.
    Nodes,
    /// Endpoints of these nodes have these weights, all others 1.
    Listed(BTreeMap<Box<str>, u16>),
}

impl Weights {
    /// Returns the weights of endpoints, by the nodes that they are on, in the same order. If all
    /// of them have none, each has 1.
    #[must_use]
    pub fn of(&self, nodes: &[Option<&str>]) -> Vec<u16> {
        let weights: Vec<u16> = match self {
            Self::Endpoints => vec![1; nodes.len()],
            Self::Nodes => {
                let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
                for node in nodes.iter().copied().flatten() {
                    *counts.entry(node).or_default() += 1;
                }
                // An endpoint without a node counts as one that is alone on its node.
                let count = |node: &Option<&str>| node.map_or(1, |node| counts[node]);
                let scale = Scale::of(&nodes.iter().map(count).collect());
                nodes.iter().map(|node| scale.weight(count(node))).collect()
            }
            Self::Listed(listed) => {
                let weight = |node: &Option<&str>| node.and_then(|node| listed.get(node)).copied();
                nodes.iter().map(|node| weight(node).unwrap_or(1)).collect()
            }
        };
        if weights.iter().all(|weight| *weight == 0) { vec![1; nodes.len()] } else { weights }
    }
}

/// Weights that are inverse to the number of endpoints on a node.
enum Scale {
    /// This number, divided by that of endpoints: the least common multiple, which makes all
    /// weights whole.
    Exact(usize),
    /// The smallest number of endpoints, which has the largest weight; others are rounded.
    Rounded(usize),
}

impl Scale {
    fn of(counts: &BTreeSet<usize>) -> Self {
        let fewest = counts.first().copied().unwrap_or(1);
        let most = fewest * usize::from(LARGEST);
        let multiple = |all: usize, count: &usize| {
            Some(all / greatest_common_divisor(all, *count) * count).filter(|multiple| *multiple <= most)
        };
        match counts.iter().try_fold(1, multiple) {
            Some(all) => Self::Exact(all),
            None => Self::Rounded(fewest),
        }
    }

    fn weight(&self, count: usize) -> u16 {
        let weight = match self {
            Self::Exact(all) => all / count,
            Self::Rounded(fewest) => (fewest * usize::from(LARGEST) + count / 2) / count,
        };
        // At most `LARGEST`, because `count` is at least the fewest.
        (weight as u16).max(1)
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

impl FromStr for Weights {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "endpoints" => return Ok(Self::Endpoints),
            "nodes" => return Ok(Self::Nodes),
            _ => {}
        }
        let mut listed = BTreeMap::new();
        for entry in text.split(',').map(str::trim) {
            let (node, weight) = entry.split_once('=').ok_or_else(|| {
                format!("{entry:?} is none of endpoints, nodes and NODE=WEIGHT (several with commas between)")
            })?;
            let weight = weight.parse().ok().filter(|weight| *weight <= LARGEST);
            let weight =
                weight.ok_or_else(|| format!("the weight of {entry:?} is no number from 0 to {LARGEST}"))?;
            if node.is_empty() || listed.insert(node.into(), weight).is_some() {
                return Err(format!("{entry:?} names no node, or one that has a weight already"));
            }
        }
        Ok(Self::Listed(listed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str, nodes: &[&str]) -> Vec<u16> {
        let nodes: Vec<_> = nodes.iter().map(|node| Some(*node).filter(|node| *node != "-")).collect();
        text.parse::<Weights>().unwrap().of(&nodes)
    }

    #[test]
    fn nodes_have_equal_shares() {
        assert_eq!(of("nodes", &["a", "a", "b", "c", "c", "c"]), [3, 3, 6, 2, 2, 2]);
        assert_eq!(of("nodes", &["a", "a", "b", "b"]), [1, 1, 1, 1]);
        assert_eq!(of("nodes", &["a", "a", "-", "-"]), [1, 1, 2, 2], "without a node: alone on it");
        assert_eq!(of("nodes", &[]), [] as [u16; 0]);
    }

    /// Weights have a bound, so that a table is filled in bounded time.
    #[test]
    fn shares_of_nodes_are_rounded_if_the_numbers_are_large() {
        let mut nodes = vec!["a"; 1_999];
        nodes.extend(["b", "c", "c", "c"]);
        let weights = of("nodes", &nodes);
        assert_eq!((weights[0], weights[1_999], weights[2_000]), (1, LARGEST, 333));
    }

    #[test]
    fn listed_nodes_have_their_weights() {
        assert_eq!(of("a=3, b=0", &["a", "b", "c", "-"]), [3, 0, 1, 1]);
        assert_eq!(of("a=0,b=0", &["a", "b"]), [1, 1], "none is left otherwise");
        assert_eq!(of("a=0,b=0", &["a", "c"]), [0, 1]);
        assert_eq!(of("endpoints", &["a", "a", "b"]), [1, 1, 1]);
    }

    #[test]
    fn what_is_no_weight() {
        for text in ["", "even", "a", "a=", "a=-1", "a=1001", "=1", "a=1,a=2", "a=1,", "Nodes"] {
            assert!(text.parse::<Weights>().is_err(), "{text:?}");
        }
    }
}
