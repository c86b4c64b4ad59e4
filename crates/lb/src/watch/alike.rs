//! Lines about nodes: each has its own, or those with the same change share one.

use std::collections::BTreeMap;

/// The number of nodes with the same change up to which each gets a line; more share one.
const ALIKE: usize = 8;
/// The number of names in such a line.
const NAMES: usize = 3;

/// Adds a line for each node, or one for many.
pub(super) fn tell(told: BTreeMap<String, Vec<&str>>, lines: &mut Vec<String>) {
    for (what, names) in told {
        if names.len() > ALIKE {
            let some = names.iter().take(NAMES).copied().collect::<Vec<_>>().join(", ");
            lines.push(format!("{} nodes ({some}, …): {what}", names.len()));
        } else {
            lines.extend(names.iter().map(|name| format!("{name}: {what}")));
        }
    }
}
