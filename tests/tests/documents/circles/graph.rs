//! Circles in a directed graph.

use std::collections::{BTreeMap, BTreeSet};

/// The nodes that each node leads to.
pub type Edges = BTreeMap<String, BTreeSet<String>>;

/// Returns the circles, which are the largest sets of nodes that all lead to each other, each with
/// the edges within it.
pub fn circles(edges: &Edges) -> Vec<String> {
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        edges.keys().map(|node| (node.as_str(), reached(edges, node))).collect();
    let mut placed = BTreeSet::new();
    let mut circles = Vec::new();
    for (node, others) in &reached {
        if !others.contains(node) || placed.contains(node) {
            continue;
        }
        let circle: Vec<&str> =
            others.iter().copied().filter(|other| reached[other].contains(node)).collect();
        placed.extend(circle.clone());
        let within = circle.iter().flat_map(|from| {
            let to = edges[*from].iter().filter(|to| circle.contains(&to.as_str()));
            to.map(move |to| format!("{from} → {to}"))
        });
        circles.push(format!("{}: {}", circle.join(" ↔ "), within.collect::<Vec<_>>().join(", ")));
    }
    circles
}

/// Returns the nodes that a node leads to, directly or through others.
fn reached<'e>(edges: &'e Edges, node: &str) -> BTreeSet<&'e str> {
    let mut reached = BTreeSet::new();
    let mut open = vec![node];
    while let Some(node) = open.pop() {
        for to in edges.get(node).into_iter().flatten() {
            if reached.insert(to.as_str()) {
                open.push(to);
            }
        }
    }
    reached
}
