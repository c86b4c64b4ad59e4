//! docs/glossary.md: one word for each concept, and the names that it has in maps, code, flags and
//! metrics.

use std::{collections::BTreeSet, fs};

use crate::page;

const PAGE: &str = "docs/glossary.md";
const MAPS: &str = "traffic-policy-ebpf/src/datapath/maps.rs";
const LAYOUTS: &str = "traffic-policy-ebpf/src/abi";
/// The heading of the maps that belong to no word.
const WITHOUT_ROW: &str = "## Maps without a row";
/// The page that lists the values of the label `map`.
const METRICS: &str = "docs/metrics.md";

/// The cells of each row: word, meaning, map, static, field, flag, metric, other names.
fn rows() -> Vec<Vec<String>> {
    let text = page::text(PAGE);
    let rows: Vec<_> =
        text.lines().filter_map(page::cells).filter(|cells| cells.len() == 8).skip(2).collect();
    assert!(rows.len() >= 40, "{PAGE} has only {} words", rows.len());
    rows
}

fn spans(cell: &str) -> Vec<&str> {
    page::code_spans(cell).collect()
}

#[test]
fn each_word_is_there_once_and_in_order() {
    let words: Vec<_> = rows().iter().map(|cells| cells[0].to_lowercase()).collect();
    let mut sorted = words.clone();
    sorted.sort();
    sorted.dedup();
    assert_eq!(words, sorted);
    for cells in rows() {
        assert!(cells[1].ends_with('.'), "{}: the meaning is a sentence", cells[0]);
    }
}

#[test]
fn maps_and_statics_belong_together() {
    let code = page::text(MAPS);
    for cells in rows() {
        let (maps, statics) = (spans(&cells[2]), spans(&cells[3]));
        assert_eq!(maps.len(), statics.len(), "{}", cells[0]);
        for (map, name) in maps.iter().zip(statics) {
            let declared = format!("#[btf_map(name = \"{map}\")]\npub static {name}:");
            assert!(code.contains(&declared), "{}: {MAPS} has no {declared}", cells[0]);
        }
    }
}

/// Every map has a row, or is among those that need none. The name of IPv4's stands for both.
#[test]
fn every_map_is_named_once() {
    let code = page::text(MAPS);
    let names = code.split("#[btf_map(name = \"").skip(1).filter_map(|rest| rest.split('"').next());
    let declared: BTreeSet<_> = names.map(|name| name.replace('6', "4")).collect();
    let in_rows: BTreeSet<_> = rows().iter().flat_map(|cells| spans(&cells[2])).map(str::to_owned).collect();
    let text = page::text(PAGE);
    let others = text.split(WITHOUT_ROW).nth(1).unwrap_or_else(|| panic!("{PAGE} has no {WITHOUT_ROW:?}"));
    let others = others.split("\n## ").next().unwrap();
    let others = others.lines().filter_map(page::cells).filter(|cells| cells.len() == 2);
    let others: Vec<_> = others
        .flat_map(|cells| spans(&cells[0]).into_iter().map(str::to_owned).collect::<Vec<_>>())
        .collect();
    for name in &others {
        assert!(declared.contains(name), "{MAPS} has no {name}");
        assert!(!in_rows.contains(name), "{name} has a row");
    }
    let lacking: Vec<_> =
        declared.iter().filter(|name| !in_rows.contains(*name) && !others.contains(name)).collect();
    assert!(declared.len() > 40 && lacking.is_empty(), "{PAGE} does not name {lacking:?}");
}

#[test]
fn fields_are_those_of_the_layouts() {
    let files = fs::read_dir(page::root().join(LAYOUTS)).unwrap();
    let texts: Vec<_> = files.map(|file| fs::read_to_string(file.unwrap().path()).unwrap()).collect();
    for cells in rows() {
        for field in spans(&cells[4]) {
            let (kind, name) = field.split_once("::").unwrap_or_else(|| panic!("{field} is no Type::field"));
            let has = |text: &String| {
                let declared = [format!("pub struct {kind} {{"), format!("pub struct {kind}<")];
                let begins = declared.iter().find_map(|declared| text.find(declared));
                let body = begins.and_then(|at| text[at..].split("\n}").next());
                body.is_some_and(|body| body.contains(&format!("    pub {name}:")))
            };
            assert!(texts.iter().any(has), "{}: {LAYOUTS} has no {field}", cells[0]);
        }
    }
}

/// Flags and metrics are looked at in all pages; here it is the column, and what those do not see.
#[test]
fn flags_annotations_and_labels_are_those_of_the_code() {
    let metrics = page::text(METRICS);
    let of_tests = |path: &str| path.split('/').any(|part| part == "tests");
    let code = page::files(&["rs"]).into_iter().filter(|path| !of_tests(path));
    let code: Vec<_> = code.map(|path| page::text(&path)).collect();
    for cells in rows() {
        for flag in spans(&cells[5]).into_iter().filter(|flag| !flag.starts_with("--")) {
            let quoted = format!("\"{flag}\"");
            assert!(code.iter().any(|text| text.contains(&quoted)), "no code reads {flag}");
        }
        for metric in spans(&cells[6]) {
            let label = metric.strip_prefix("map=\"").and_then(|value| value.strip_suffix('"'));
            let known = match label {
                Some(value) => metrics.contains(&format!("`{value}`")),
                None => metrics.contains(&format!("| `{metric}` |")),
            };
            assert!(known, "{}: {METRICS} has no {metric}", cells[0]);
        }
    }
}
