//! docs/maps.md: every map of the object. Type, sizes and entries are generated from the object;
//! the content, and the writers and readers of each map, are written by hand.

use std::collections::{BTreeMap, BTreeSet};

use aya_obj::{Map, Object};
use traffic_policy_dataplane::{MapSizes, object_bytes};
use traffic_policy_ebpf::abi::ABI_VERSION;

use crate::page;

const PAGE: &str = "docs/maps.md";
/// The parts of the page.
const PARTS: [&str; 5] = ["services", "flows", "next hops", "sockets", "state and counts"];
const HEADINGS: [&str; 7] =
    ["Map", "Type", "Key, bytes", "Value, bytes", "Entries", "Key → value", "Written by → read by"];
/// The number of columns that are generated from the object.
const MADE: usize = 5;

const BPF_F_NO_PREALLOC: u32 = 1;
const BPF_F_MMAPABLE: u32 = 1024;

/// The generated columns of one or two maps (IPv4 and IPv6).
type Made = [String; MADE - 1];

#[test]
fn the_page_lists_every_map() {
    let mut maps = maps();
    let mut unexplained = Vec::new();
    for part in PARTS {
        let mut rows: Vec<Vec<String>> = Vec::new();
        for (name, text) in written(part) {
            let Some(made) = maps.remove(&name) else { continue };
            if text.iter().any(String::is_empty) {
                unexplained.push(name.clone());
            }
            rows.push([vec![name], made.to_vec(), text].concat());
        }
        page::compare(PAGE, part, &page::table(&HEADINGS, &rows));
    }
    assert!(maps.is_empty(), "{PAGE} has no row for {:?}: add one with the name", maps.keys());
    assert!(unexplained.is_empty(), "{PAGE} does not explain {unexplained:?}");
}

/// Pages name the version of the maps' layout, which is a part of the path of pins.
#[test]
fn pages_name_the_layout_of_the_maps() {
    for (path, text) in [
        ("docs/bench.md", format!("/sys/fs/bpf/traffic-policy/v{ABI_VERSION}/programs")),
        ("docs/operating.md", format!("(`v{ABI_VERSION}`)")),
        ("CHANGELOG.md", format!("layout {ABI_VERSION} ")),
    ] {
        assert!(page::text(path).contains(&text), "{path} does not say {text}");
    }
}

/// The names, and the columns that are written by hand, of one part of the page.
fn written(part: &str) -> Vec<(String, Vec<String>)> {
    let part = page::part(PAGE, part);
    let rows = part.lines().skip(2).filter_map(page::cells);
    rows.map(|cells| {
        let column = |number: usize| cells.get(number).cloned().unwrap_or_default();
        (column(0), (MADE..HEADINGS.len()).map(column).collect())
    })
    .collect()
}

/// All maps of the object by their names on the page: those of the two families share a row.
fn maps() -> BTreeMap<String, Made> {
    let object = Object::parse(object_bytes()).unwrap();
    // Globals (.rodata) are maps, too, but without interest for users.
    let names: BTreeSet<_> = object.maps.keys().filter(|name| !name.starts_with('.')).collect();
    assert!(names.len() > 20, "{names:?}");
    let mut rows = BTreeMap::new();
    for name in &names {
        if let Some(size) = MapSizes::DEFAULT.of(name) {
            assert_eq!(
                object.maps[*name].max_entries(),
                size,
                "{name}: its declaration, and MapSizes::DEFAULT"
            );
        }
        let twin = name.strip_suffix('6').map(|stem| format!("{stem}4"));
        if twin.is_some_and(|twin| names.contains(&twin)) {
            continue;
        }
        let map = &object.maps[*name];
        let twin = name.strip_suffix('4').map(|stem| format!("{stem}6")).filter(|twin| names.contains(twin));
        let row = match twin {
            None => (format!("`{name}`"), described(map)),
            Some(twin) => {
                let (v4, v6) = (described(map), described(&object.maps[&twin]));
                let both = |column: usize| {
                    let (v4, v6) = (&v4[column], &v6[column]);
                    if v4 == v6 { v4.clone() } else { format!("{v4} / {v6}") }
                };
                (format!("`{name}`, `{twin}`"), std::array::from_fn(both))
            }
        };
        rows.insert(row.0, row.1);
    }
    rows
}

fn described(map: &Map) -> Made {
    // linux/bpf.h, enum bpf_map_type
    let kind = match map.map_type() {
        1 => "hash",
        2 => "array",
        3 => "array of programs",
        6 => "per-CPU array",
        9 => "LRU hash",
        11 => "LPM trie",
        27 => "ring buffer",
        other => panic!("{PAGE} has no word for maps of type {other}"),
    };
    let mut kind = kind.to_owned();
    if map.map_type() == 1 && map.map_flags() & BPF_F_NO_PREALLOC == 0 {
        kind.push_str(", preallocated");
    }
    if map.map_flags() & BPF_F_MMAPABLE != 0 {
        kind.push_str(", mapped");
    }
    // The size of a ring buffer is in bytes instead of entries.
    let entries = grouped(map.max_entries()) + if map.map_type() == 27 { " bytes" } else { "" };
    let size = |bytes: u32| if bytes == 0 { "–".to_owned() } else { grouped(bytes) };
    [kind, size(map.key_size()), size(map.value_size()), entries]
}

/// Formats 262144 as 262,144.
fn grouped(number: u32) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
