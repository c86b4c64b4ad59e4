//! Calls and stack frames of the compiled object.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use object::{Object, ObjectSection, ObjectSymbol, RelocationTarget, SectionIndex, SymbolKind};

use crate::recorded::Figures;

/// Functions that are loops over single bytes; small structures must be copied inline.
const COPIES: [&str; 5] = ["memset", "memcpy", "memmove", "memcmp", "bcmp"];
/// The opcode of a call to another function of the same object (linux/bpf.h: BPF_JMP | BPF_CALL,
/// BPF_PSEUDO_CALL).
const CALL: u8 = 0x85;
const OWN_FUNCTION: u8 = 1;
/// The opcode of an instruction of two slots; with a relocation, it loads the address of a map, of
/// a constant or of a function.
const LOAD_WIDE: u8 = 0x18;
/// The section of functions that are not programs.
const FUNCTIONS: &str = ".text";
/// The unit of stack frames in bytes, 32 until 6.6 and where no JIT reports another: the kernel
/// rounds the stack of each function up to it, and counts a function without a stack as one unit.
/// <https://github.com/torvalds/linux/blob/v6.1/kernel/bpf/verifier.c#L4345>
const FRAME: u64 = 32;

/// A function of the object.
#[derive(Default)]
struct Function {
    /// The bytes of the function's stack.
    stack: u64,
    /// The functions that it calls, and the callbacks that it passes to the kernel, which run on
    /// top of it.
    calls: BTreeSet<String>,
    /// Whether the kernel enters the program here.
    is_program: bool,
}

/// All functions by their symbols.
pub struct Code(BTreeMap<String, Function>);

/// The functions of the packet path that run on top of each other, in the chain of a program with
/// the largest stack.
pub struct Chain {
    pub functions: Vec<String>,
    /// The sum as the kernel computes it.
    pub bytes: u64,
}

impl fmt::Display for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.functions.iter().map(|name| short(name)).collect();
        write!(f, "{}: {}", self.bytes, names.join(" → "))
    }
}

impl Code {
    pub fn of(bytes: &[u8]) -> Self {
        let file = object::File::parse(bytes).unwrap();
        let mut code = Self(BTreeMap::new());
        for section in file.sections().filter(|section| section.kind() == object::SectionKind::Text) {
            code.add(&file, &section);
        }
        code
    }

    fn add(&mut self, file: &object::File<'_>, section: &object::Section<'_, '_>) {
        let code = section.data().unwrap();
        let relocations: BTreeMap<u64, _> = section.relocations().collect();
        let is_program = section.name() != Ok(FUNCTIONS);
        let (mut at, mut copied) = (0, None);
        while let Some(instruction) = code.get(at..at + 8) {
            let name = function(file, Some(section.index()), at as u64);
            let own = self.0.entry(name).or_default();
            own.is_program = is_program;
            let relocation = relocations.get(&(at as u64)).map(object::Relocation::target);
            own.calls.extend(called(file, section.index(), at, instruction, relocation));
            if let Some((depth, next)) = depth(instruction, copied) {
                own.stack = own.stack.max(depth);
                copied = next;
            }
            at += if instruction[0] == LOAD_WIDE { 16 } else { 8 };
        }
    }

    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Calls of functions that copy: the caller and the callee.
    pub fn copies(&self) -> Vec<(&str, &str)> {
        let calls = self.0.iter().flat_map(|(name, function)| {
            function.calls.iter().map(move |called| (name.as_str(), called.as_str()))
        });
        calls.filter(|(_, called)| COPIES.contains(called)).collect()
    }

    /// The chain of each program with the largest stack.
    pub fn chains(&self) -> Vec<Chain> {
        let programs = self.0.iter().filter(|(_, function)| function.is_program);
        programs.map(|(name, _)| self.deepest(name, &mut Vec::new())).collect()
    }

    fn deepest(&self, name: &str, above: &mut Vec<String>) -> Chain {
        assert!(!above.iter().any(|caller| caller == name), "{name} calls itself: {above:?}");
        let function = self.0.get(name).unwrap_or_else(|| panic!("no function {name}"));
        above.push(name.to_owned());
        let deepest = function.calls.iter().map(|called| self.deepest(called, above));
        let below = deepest.max_by_key(|chain| chain.bytes);
        above.pop();
        let mut chain = below.unwrap_or(Chain { functions: Vec::new(), bytes: 0 });
        chain.functions.insert(0, name.to_owned());
        chain.bytes += function.stack.max(1).next_multiple_of(FRAME);
        chain
    }

    /// The stack in bytes of each function, callbacks included, and of each program with all that
    /// it calls.
    pub fn figures(&self) -> Figures {
        let mut figures = Figures::new();
        for (name, function) in self.0.iter().filter(|(name, _)| !COPIES.contains(&name.as_str())) {
            let most = figures.entry(format!("stack {}", short(name))).or_default();
            *most = function.stack.max(*most);
        }
        figures.extend(self.chains().into_iter().map(|chain| {
            let name = format!("stack of calls {}", short(&chain.functions[0]));
            (name, chain.bytes)
        }));
        figures
    }
}

/// Shortens the mangled name of a callback, of which the last part identifies it. The names of
/// programs are not mangled.
fn short(name: &str) -> &str {
    if name.starts_with("tp_") {
        return name;
    }
    name.rsplit(|c: char| c.is_ascii_digit() && c != '4' && c != '6').next().unwrap_or(name)
}

/// The function that an instruction calls, or whose address it loads: `bpf_loop` calls it.
fn called(
    file: &object::File<'_>,
    section: SectionIndex,
    at: usize,
    instruction: &[u8],
    relocation: Option<RelocationTarget>,
) -> Option<String> {
    let &[opcode, registers, _, _, a, b, c, d] = instruction else { return None };
    let number = i64::from(i32::from_le_bytes([a, b, c, d]));
    let is_call = opcode == CALL && registers >> 4 == OWN_FUNCTION;
    let Some(RelocationTarget::Symbol(index)) = relocation else {
        // A call within a section needs no relocation.
        return is_call.then(|| function(file, Some(section), (at as i64 + (number + 1) * 8) as u64));
    };
    if !is_call && opcode != LOAD_WIDE {
        return None;
    }
    let symbol = file.symbol_by_index(index).unwrap();
    let of = symbol.section_index()?;
    if file.section_by_index(of).unwrap().kind() != object::SectionKind::Text {
        return None;
    }
    Some(match symbol.kind() {
        // The distance of a call counts in slots from the next one, that of an address in bytes.
        SymbolKind::Section if is_call => function(file, Some(of), ((number + 1) * 8) as u64),
        SymbolKind::Section => function(file, Some(of), number as u64),
        _ => symbol.name().unwrap().to_owned(),
    })
}

/// The function at an offset of a section.
fn function(file: &object::File<'_>, section: Option<SectionIndex>, offset: u64) -> String {
    let symbols = file.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text);
    let of_section = symbols.filter(|symbol| symbol.section_index() == section);
    let found = of_section.filter(|symbol| symbol.address() <= offset).max_by_key(ObjectSymbol::address);
    found.map_or_else(|| format!("offset {offset:#x}"), |symbol| symbol.name().unwrap().to_owned())
}

/// The depth of an instruction's stack access, and the register into which it copies the frame
/// pointer. `copied` is that register of the previous instruction: two such instructions in a row
/// compute an address of the stack.
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
