//! The Nodes of a cluster in classes, so that a Service examines each class once instead of each
//! node.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use traffic_policy_cluster::model::object::{Node, Readiness};

/// The properties that the judgement of a node without an endpoint depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Kind<'a> {
    pub zone: Option<&'a str>,
    /// Whether it is being deleted, or tainted by the autoscaler.
    pub leaving: bool,
    /// Whether a label excludes it from balancers.
    pub excluded: bool,
    pub readiness: Readiness,
    pub preemptible: bool,
    pub unschedulable: bool,
    /// Whether endpoints name it, but there is no such Node.
    pub missing: bool,
}

impl<'a> Kind<'a> {
    fn of(node: &'a Node) -> Self {
        Self {
            zone: node.zone.as_deref(),
            leaving: node.leaving,
            excluded: node.standing.excluded,
            readiness: node.standing.readiness,
            preemptible: node.standing.preemptible,
            unschedulable: node.standing.unschedulable,
            missing: false,
        }
    }
}

/// One node, or those of a class that need no row of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Who<'a> {
    Node(&'a str),
    /// The nodes of a class, by its number.
    Others(usize),
}

#[derive(Debug, Default)]
pub struct Nodes<'a> {
    by_name: HashMap<&'a str, usize>,
    classes: Vec<(Kind<'a>, BTreeSet<&'a str>)>,
    provider: Option<&'a str>,
}

impl<'a> Nodes<'a> {
    pub fn new(nodes: impl Iterator<Item = &'a Node>) -> Self {
        let mut by_kind: BTreeMap<Kind<'a>, BTreeSet<&'a str>> = BTreeMap::new();
        let mut provider = None;
        for node in nodes {
            by_kind.entry(Kind::of(node)).or_default().insert(&node.name);
            provider = provider.or(node.standing.provider.as_deref());
        }
        let classes: Vec<_> = by_kind.into_iter().collect();
        let names = classes.iter().enumerate();
        let by_name = names.flat_map(|(at, (_, names))| names.iter().map(move |name| (*name, at))).collect();
        Self { by_name, classes, provider }
    }

    pub fn provider(&self) -> Option<&'a str> {
        self.provider
    }

    pub fn count(&self) -> usize {
        self.by_name.len()
    }

    pub fn kind(&self, name: &str) -> Kind<'a> {
        match self.by_name.get(name) {
            Some(class) => self.classes[*class].0.clone(),
            None => Kind { missing: true, ..Kind::default() },
        }
    }

    /// Returns the classes without the `special` nodes: class, kind, and the number of remaining
    /// nodes.
    pub fn others(&self, special: &BTreeSet<&str>) -> Vec<(usize, Kind<'a>, usize)> {
        let mut counts: Vec<usize> = self.classes.iter().map(|(_, names)| names.len()).collect();
        for class in special.iter().filter_map(|name| self.by_name.get(name)) {
            counts[*class] -= 1;
        }
        let classes = self.classes.iter().zip(counts).enumerate();
        classes
            .filter(|(_, (_, count))| *count > 0)
            .map(|(at, ((kind, _), count))| (at, kind.clone(), count))
            .collect()
    }

    /// Returns the names of nodes of a class that are not `special`, at most `most`.
    pub fn names(&self, class: usize, special: &BTreeSet<&str>, most: usize) -> Vec<&'a str> {
        let names = self.classes.get(class).into_iter().flat_map(|(_, names)| names);
        names.filter(|name| !special.contains(*name)).take(most).copied().collect()
    }
}
