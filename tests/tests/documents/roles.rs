//! The order of the pages by role: README.md names them, docs/README.md has a sentence about each.

use std::collections::BTreeMap;

use crate::page;

const README: &str = "README.md";
const INDEX: &str = "docs/README.md";
const ROLES: [&str; 4] = ["take first steps", "operate", "understand", "extend"];

#[test]
fn every_page_has_a_role() {
    let mut roles: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (role, pages) in ROLES.into_iter().zip(ROLES.map(in_readme)) {
        for page in pages {
            roles.entry(page).or_default().push(role);
        }
    }
    let pages = page::all().into_iter().filter(|path| ![README, INDEX].contains(&path.as_str()));
    let missing: Vec<_> = pages.filter(|path| roles.get(path).map(Vec::len) != Some(1)).collect();
    assert!(missing.is_empty(), "{README} has none or several roles for {missing:?}");
    assert!(page::text(README).contains(&format!("({INDEX})")), "{README} does not link to {INDEX}");
}

#[test]
fn both_orders_are_the_same() {
    for role in ROLES {
        assert_eq!(in_readme(role), in_index(role), "`{role}` in {README} and {INDEX}");
    }
}

/// Pages of a role by the README, by their paths from the root.
fn in_readme(role: &str) -> Vec<String> {
    let text = page::text(README);
    let row = text.lines().filter_map(page::cells).find(|cells| cells[0] == role);
    row.map(|cells| targets(&cells[1])).unwrap_or_default()
}

/// Pages of a role by docs/README.md, by their paths from the root.
fn in_index(role: &str) -> Vec<String> {
    let text = page::text(INDEX);
    let below = text.lines().skip_while(|line| line.to_lowercase() != format!("## {role}")).skip(1);
    let rows = below.take_while(|line| !line.starts_with('#')).filter_map(page::cells);
    let links = rows.flat_map(|cells| targets(&cells[0]));
    links.map(|link| link.strip_prefix("../").map_or_else(|| format!("docs/{link}"), str::to_owned)).collect()
}

fn targets(cell: &str) -> Vec<String> {
    cell.split("](").skip(1).filter_map(|rest| rest.split(')').next()).map(str::to_owned).collect()
}
