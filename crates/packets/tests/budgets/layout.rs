//! Layouts of all maps and the indices of tail calls, as the object and the loader define them,
//! compared with the record for this version of the layout. An agent takes over maps of the same
//! version: two layouts with the same version that differ would misread each other's bytes.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;

use object::{Object, ObjectSection};
use traffic_policy_dataplane as dataplane;
use traffic_policy_ebpf::abi::ABI_VERSION;

const RECORDED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/budgets/layout.txt");

#[test]
fn a_layout_has_one_version() {
    let found = listing();
    assert!(found.lines().count() > 60, "the object tells of too little:\n{found}");
    let recorded = fs::read_to_string(RECORDED).unwrap_or_default();
    let recorded_version: u32 = field(&recorded, "version ").and_then(|text| text.parse().ok()).unwrap_or(0);
    let same = field(&recorded, "hash ") == Some(&hash(&found));
    if std::env::var_os("UPDATE_BUDGETS").is_some() {
        // A version that was never released may be recorded again.
        let unreleased = std::env::var("UPDATE_BUDGETS").is_ok_and(|value| value == "unreleased");
        assert!(
            same || ABI_VERSION > recorded_version || unreleased,
            "the layout differs from version {recorded_version}: raise ABI_VERSION, or say UPDATE_BUDGETS=unreleased if no release had it"
        );
        let head = "# Written by `UPDATE_BUDGETS=1 cargo xtask test budgets`.";
        let text = format!("{head}\nversion {ABI_VERSION}\nhash {}\n{found}", hash(&found));
        fs::write(RECORDED, text).unwrap();
        return;
    }
    assert!(
        same && recorded_version == ABI_VERSION,
        "the layout is not that of version {ABI_VERSION} as it was recorded (version {recorded_version}). Raise ABI_VERSION if \
         it was not raised, then run again with UPDATE_BUDGETS=1 and commit {RECORDED}. What differs:\n{}",
        difference(&recorded, &found)
    );
}

/// The test detects another size, another index, and another name of a field.
#[test]
fn any_change_of_a_layout_changes_the_hash() {
    let listing = listing();
    let first = hash(&listing);
    let size = listing.lines().find(|line| line.starts_with("map tp_flows4 ")).unwrap();
    assert!(size.contains("key FlowKey") && size.contains("value Flow") && size.contains("hop@"), "{size}");
    for (from, to) in
        [("hop@", "pop@"), ("jump xdp 0 ", "jump xdp 9 "), ("map tp_flows4 type 1", "map tp_flows4 type 9")]
    {
        assert!(listing.contains(from), "no {from:?} in\n{listing}");
        assert_ne!(hash(&listing.replacen(from, to, 1)), first, "{from}");
    }
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name))
}

/// FNV-1a, which is the same for every compiler.
fn hash(listing: &str) -> String {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    format!("{:016x}", listing.bytes().fold(0xcbf2_9ce4_8422_2325, step))
}

fn difference(recorded: &str, found: &str) -> String {
    let is_listed = |line: &&str| line.starts_with("map ") || line.starts_with("jump ");
    let only = |one: &str, other: &str, sign: &str| {
        let lines = one.lines().filter(is_listed).filter(|line| !other.lines().any(|held| held == *line));
        lines.map(|line| format!("{sign} {line}\n")).collect::<String>()
    };
    only(recorded, found, "-") + &only(found, recorded, "+")
}

/// One line for each map, and one for each tail call.
fn listing() -> String {
    let bytes = dataplane::object_bytes();
    let types = Types::of(bytes);
    let mut text = String::new();
    let shapes = aya_obj::Object::parse(bytes).unwrap();
    for (name, map) in
        shapes.maps.iter().filter(|(name, _)| !name.starts_with('.')).collect::<BTreeMap<_, _>>()
    {
        let (kind, flags, sizes) = (map.map_type(), map.map_flags(), (map.key_size(), map.value_size()));
        let described = types.map(name);
        writeln!(text, "map {name} type {kind} flags {flags} sizes {sizes:?} {described}").unwrap();
    }
    for (hook, index, program) in dataplane::jump_table() {
        writeln!(text, "jump {hook} {index} {program}").unwrap();
    }
    text
}

/// The BTF of the object (include/uapi/linux/btf.h).
struct Types {
    /// The types by number.
    all: Vec<Type>,
    strings: Vec<u8>,
}

struct Type {
    name: u32,
    kind: u32,
    /// Size or type.
    of: u32,
    /// The words that follow the header.
    words: Vec<u32>,
}

mod kind {
    pub const INT: u32 = 1;
    pub const PTR: u32 = 2;
    pub const ARRAY: u32 = 3;
    pub const STRUCT: u32 = 4;
    pub const UNION: u32 = 5;
    pub const ENUM: u32 = 6;
    pub const FUNC_PROTO: u32 = 13;
    pub const VAR: u32 = 14;
    pub const DATASEC: u32 = 15;
    pub const DECL_TAG: u32 = 17;
    pub const ENUM64: u32 = 19;
}

impl Types {
    fn of(object: &[u8]) -> Self {
        let file = object::File::parse(object).unwrap();
        let section = file.section_by_name(".BTF").expect("the object has BTF");
        let data = section.data().unwrap();
        let word = |at: usize| u32::from_le_bytes(*data[at..].first_chunk().unwrap());
        let (header, types, length, strings) =
            (word(4) as usize, word(8) as usize, word(12) as usize, word(16) as usize);
        let (mut at, end) = (header + types, header + types + length);
        // Number 0 is void.
        let mut all = vec![Type { name: 0, kind: 0, of: 0, words: Vec::new() }];
        while at < end {
            let (info, count) = (word(at + 4), (word(at + 4) & 0xffff) as usize);
            let kind = info >> 24 & 31;
            let extra = match kind {
                kind::INT | kind::VAR | kind::DECL_TAG => 1,
                kind::ARRAY => 3,
                kind::STRUCT | kind::UNION | kind::DATASEC | kind::ENUM64 => 3 * count,
                kind::ENUM | kind::FUNC_PROTO => 2 * count,
                _ => 0,
            };
            let words = (0..extra).map(|number| word(at + 12 + 4 * number)).collect();
            all.push(Type { name: word(at), kind, of: word(at + 8), words });
            at += 12 + 4 * extra;
        }
        Self { all, strings: data[header + strings..].to_vec() }
    }

    fn text(&self, offset: u32) -> String {
        let bytes = &self.strings[offset as usize..];
        let length = bytes.iter().position(|byte| *byte == 0).unwrap();
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    }

    /// The key or value of a map: the type to which the member of that name in its definition
    /// points.
    fn map(&self, name: &str) -> String {
        let variable = self.all.iter().find(|found| found.kind == kind::VAR && self.text(found.name) == name);
        let mut definition = &self.all[variable.unwrap_or_else(|| panic!("no BTF of {name}")).of as usize];
        // aya wraps it in an UnsafeCell.
        while definition.kind == kind::STRUCT && definition.words.len() == 3 {
            definition = &self.all[definition.words[1] as usize];
        }
        let part = |wanted: &str| {
            let mut members = definition.words.chunks_exact(3);
            let member = members.find(|member| self.text(member[0]) == wanted)?;
            let pointer = &self.all[member[1] as usize];
            (pointer.kind == kind::PTR).then(|| self.describe(pointer.of))
        };
        let parts = ["key", "value"].map(|wanted| part(wanted).map(|found| format!("{wanted} {found}")));
        parts.into_iter().flatten().collect::<Vec<_>>().join(" ")
    }

    /// Describes a type with all that it consists of: fields at their bit offsets.
    fn describe(&self, number: u32) -> String {
        let found = &self.all[number as usize];
        match found.kind {
            kind::INT => self.text(found.name),
            kind::ARRAY => format!("[{}; {}]", self.describe(found.words[0]), found.words[2]),
            kind::STRUCT | kind::UNION => {
                let fields = found.words.chunks_exact(3).map(|member| {
                    format!("{}@{} {}", self.text(member[0]), member[2] & 0xff_ffff, self.describe(member[1]))
                });
                let fields = fields.collect::<Vec<_>>().join(", ");
                format!("{}({}) {{{fields}}}", self.text(found.name), found.of)
            }
            _ => format!("{}#{}", self.text(found.name), found.kind),
        }
    }
}
