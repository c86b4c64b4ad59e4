//! What the packet path costs before a packet comes, so that growth is seen when it happens: instructions that the
//! verifier walks, bytes of the maps and of the stack, calls that should have been inlined. `UPDATE_BUDGETS=1` writes the file anew.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use aya::programs::ProgramInfo;
use object::{Object, ObjectSection, ObjectSymbol, RelocationTarget};
use traffic_policy_agent::dataplane::{self, Kernel, Sizes};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/budgets.txt");

/// Kernels and compilers differ a little.
const TOLERANCE_PERCENT: u64 = 5;
/// Far below what any kernel verifies (1,000,000), so that older ones that prune less have room.
const MOST_VERIFIED: u64 = 250_000;
/// The kernel lets a function and its callback use 512 together; older ones round each up to 32.
const MOST_STACK: u64 = 512 - 32;

/// Figures by name, one a line in the file.
type Figures = BTreeMap<String, u64>;

#[test]
fn budgets_hold() {
    let found = measure();
    let mut text =
        String::from("# Written by `UPDATE_BUDGETS=1 cargo test -p traffic-policy-tests --test budgets`.\n");
    for (name, figure) in &found {
        writeln!(text, "{name} {figure}").unwrap();
    }
    if std::env::var_os("UPDATE_BUDGETS").is_some() {
        fs::write(FILE, text).unwrap();
        return;
    }
    let budgets: Figures = fs::read_to_string(FILE)
        .unwrap()
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let (name, figure) = line.rsplit_once(' ').unwrap();
            (name.to_owned(), figure.parse().unwrap())
        })
        .collect();
    let mut wrong = Vec::new();
    for name in budgets.keys().chain(found.keys()).collect::<std::collections::BTreeSet<_>>() {
        match (budgets.get(name), found.get(name)) {
            (Some(budget), Some(figure)) if figure.abs_diff(*budget) * 100 <= budget * TOLERANCE_PERCENT => {}
            (budget, figure) => wrong.push(format!("{name}: budget {budget:?}, found {figure:?}")),
        }
    }
    assert!(
        wrong.is_empty(),
        "{}\nIf this is meant, run again with UPDATE_BUDGETS=1 and commit the file.",
        wrong.join("\n")
    );
}

#[test]
fn far_from_the_limits_of_the_kernel() {
    for (name, figure) in measure() {
        let most = match name.split(' ').next() {
            Some("verified") => MOST_VERIFIED,
            Some("stack") => MOST_STACK,
            _ => continue,
        };
        assert!(figure <= most, "{name}: {figure}");
    }
}

fn measure() -> Figures {
    // Says what is missing in a sentence.
    dataplane::check_privileges().unwrap_or_else(|error| panic!("budgets: {error:#}"));
    let kernel = Kernel::running().unwrap();
    let mut object =
        dataplane::load(Sizes::default(), None, &kernel).unwrap_or_else(|error| panic!("budgets: {error:#}"));
    dataplane::load_programs(&mut object).unwrap();
    let mut figures = Figures::new();
    for (name, program) in object.programs() {
        let info: ProgramInfo = program.info().unwrap();
        let verified = info.verified_instruction_count().expect("known since Linux 5.16");
        figures.insert(format!("verified {name}"), verified.into());
        figures.insert(format!("bytes {name}"), info.size_translated().unwrap_or_default().into());
    }
    let mut all = 0;
    for (name, map) in object.maps() {
        if name.starts_with('.') {
            continue;
        }
        let bytes = memory(map_fd(map));
        all += bytes;
        figures.insert(format!("memory {name}"), bytes);
    }
    figures.insert("memory of all maps".to_owned(), all);
    let file = object::File::parse(dataplane::object_bytes()).unwrap();
    figures.extend(stacks(&file).into_iter().map(|(name, bytes)| (format!("stack {name}"), bytes)));
    figures
}

fn map_fd(map: &aya::maps::Map) -> BorrowedFd<'_> {
    use aya::maps::Map;
    match map {
        Map::Array(map)
        | Map::HashMap(map)
        | Map::LpmTrie(map)
        | Map::LruHashMap(map)
        | Map::PerCpuArray(map)
        | Map::ProgramArray(map)
        | Map::RingBuf(map) => map.fd().as_fd(),
        other => panic!("a map of another type: {other:?}"),
    }
}

/// What the kernel charges for a map, in bytes.
fn memory(map: BorrowedFd<'_>) -> u64 {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", map.as_raw_fd())).unwrap();
    let memlock = info.lines().find_map(|line| line.strip_prefix("memlock:"));
    memlock.expect("fdinfo of a map names its memory").trim().parse().unwrap()
}

/// These are loops that write byte by byte; small structures are to be written inline.
const COPIES: [&str; 5] = ["memset", "memcpy", "memmove", "memcmp", "bcmp"];
/// A call of another function of the same object (linux/bpf.h: BPF_JMP | BPF_CALL, BPF_PSEUDO_CALL).
const CALL: u8 = 0x85;
const OWN_FUNCTION: u8 = 1;
/// An instruction of two slots.
const LOAD_WIDE: u8 = 0x18;

#[test]
fn nothing_is_copied_by_a_call() {
    let file = object::File::parse(dataplane::object_bytes()).unwrap();
    let copies: Vec<_> = calls(&file).into_iter().filter(|(_, to)| COPIES.contains(&to.as_str())).collect();
    assert!(copies.is_empty(), "{copies:?}");
    assert!(file.symbols().any(|symbol| symbol.name() == Ok("xdp_ingress")), "this is another object");
}

/// Names of the calling and of the called function. A call within a section needs no relocation.
fn calls(file: &object::File<'_>) -> Vec<(String, String)> {
    let mut calls = Vec::new();
    for section in file.sections().filter(|section| section.kind() == object::SectionKind::Text) {
        let code = section.data().unwrap();
        let relocations: BTreeMap<u64, _> = section.relocations().collect();
        let mut at = 0;
        while let Some(&[opcode, registers, _, _, a, b, c, d]) = code.get(at..at + 8) {
            if opcode == CALL && registers >> 4 == OWN_FUNCTION {
                let slots = i64::from(i32::from_le_bytes([a, b, c, d])) + 1;
                let called = match relocations.get(&(at as u64)).map(object::Relocation::target) {
                    Some(RelocationTarget::Symbol(index)) => {
                        let symbol = file.symbol_by_index(index).unwrap();
                        match symbol.kind() {
                            object::SymbolKind::Section => {
                                function(file, symbol.section_index(), (slots * 8) as u64)
                            }
                            _ => symbol.name().unwrap().to_owned(),
                        }
                    }
                    _ => function(file, Some(section.index()), (at as i64 + slots * 8) as u64),
                };
                calls.push((function(file, Some(section.index()), at as u64), called));
            }
            at += if opcode == LOAD_WIDE { 16 } else { 8 };
        }
    }
    calls
}

/// The function at an offset of a section.
fn function(file: &object::File<'_>, section: Option<object::SectionIndex>, offset: u64) -> String {
    let symbols = file.symbols().filter(|symbol| symbol.kind() == object::SymbolKind::Text);
    let of_section = symbols.filter(|symbol| symbol.section_index() == section);
    let found = of_section.filter(|symbol| symbol.address() <= offset).max_by_key(ObjectSymbol::address);
    found.map_or_else(|| format!("offset {offset:#x}"), |symbol| symbol.name().unwrap().to_owned())
}

/// Bytes of stack that each function of the packet path uses, callbacks included.
fn stacks(file: &object::File<'_>) -> Figures {
    let mut stacks = Figures::new();
    for section in file.sections().filter(|section| section.kind() == object::SectionKind::Text) {
        let code = section.data().unwrap();
        let mut copied = None;
        for at in (0..code.len()).step_by(8) {
            let Some((depth, next)) = depth(&code[at..at + 8], copied) else { continue };
            copied = next;
            let name = function(file, Some(section.index()), at as u64);
            // Callbacks have mangled names, of which the last part says which one it is.
            let name =
                name.rsplit(|c: char| c.is_ascii_digit() && c != '4' && c != '6').next().unwrap().to_owned();
            let most = stacks.entry(name).or_default();
            *most = depth.max(*most);
        }
    }
    stacks.retain(|name, _| !COPIES.contains(&name.as_str()));
    stacks
}

/// How deep an instruction reaches into the stack, and the register that it makes a copy of the frame pointer. `copied`
/// is what the instruction before said: an address of the stack is made by two in a row.
fn depth(instruction: &[u8], copied: Option<u8>) -> Option<(u64, Option<u8>)> {
    const FRAME: u8 = 10;
    let &[opcode, registers, low, high, a, b, c, d] = instruction else { return None };
    let (to, from) = (registers & 15, registers >> 4);
    let offset = i64::from(i16::from_le_bytes([low, high]));
    let number = i64::from(i32::from_le_bytes([a, b, c, d]));
    let reached = match opcode {
        // Loads; stores of numbers and of registers.
        0x61 | 0x69 | 0x71 | 0x79 if from == FRAME => offset,
        0x62 | 0x6a | 0x72 | 0x7a | 0x63 | 0x6b | 0x73 | 0x7b if to == FRAME => offset,
        // r += number
        0x07 if copied == Some(to) => number,
        _ => 0,
    };
    // r = frame pointer
    let copied = (opcode == 0xbf && from == FRAME).then_some(to);
    Some((reached.min(0).unsigned_abs(), copied))
}
