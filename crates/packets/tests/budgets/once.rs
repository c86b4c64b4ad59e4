//! Words that other CPUs write while a program reads them: the compiled program must read each of
//! them once. The route of a slot is accepted if the hash of the words that were read matches; a
//! word that is read again after that check may be another's.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use object::{Object, ObjectSection, ObjectSymbol, RelocationTarget};

/// The relevant opcodes (RFC 9669).
const LOAD_WIDE: u8 = 0x18;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
const JUMP: u8 = 0x05;
const MOVE: u8 = 0xbf;
const ADD_NUMBER: u8 = 0x07;
const CLASS: u8 = 0x07;
const CLASS_LOAD: u8 = 0x01;
const CLASS_STORE_REGISTER: u8 = 0x03;
const CLASS_JUMP: u8 = 0x05;
const CLASS_JUMP32: u8 = 0x06;
const MODE: u8 = 0xe0;
const MODE_MEMORY: u8 = 0x60;
const STORE_8: u8 = 0x7b;
const LOAD_8: u8 = 0x79;
const LOOK_UP: i32 = 1;
const FRAME: u8 = 10;

/// A look-up in a map, and the bytes of the value that the program reads afterwards.
#[derive(Debug)]
pub struct Reads {
    /// The program, and the offset of the call.
    pub at: String,
    /// The bytes of the value that some path reads.
    pub read: BTreeSet<i32>,
    /// The bytes of the value that some path reads more than once.
    pub again: BTreeSet<i32>,
}

#[derive(Clone, Copy)]
struct Instruction {
    opcode: u8,
    to: u8,
    from: u8,
    offset: i16,
    number: i32,
}

/// The registers with an address in the value, and the bytes that were read through them.
#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    /// The registers, and the bytes of the stack, that point into the value: the distance of each
    /// from its beginning.
    registers: BTreeMap<u8, i32>,
    stack: BTreeMap<i16, i32>,
    read: BTreeSet<i32>,
}

/// The loads from the values of a map, for each look-up.
pub fn reads(bytes: &[u8], map: &str) -> Vec<Reads> {
    let file = object::File::parse(bytes).unwrap();
    let mut found = Vec::new();
    for section in file.sections().filter(|section| section.kind() == object::SectionKind::Text) {
        let code = instructions(section.data().unwrap());
        let maps: BTreeSet<usize> = section
            .relocations()
            .filter(|(_, relocation)| match relocation.target() {
                RelocationTarget::Symbol(index) => file.symbol_by_index(index).unwrap().name() == Ok(map),
                _ => false,
            })
            .map(|(at, _)| at as usize / 8)
            .collect();
        for at in maps {
            // The call to which the map is passed.
            let Some(call) = (at..code.len()).find(|at| code[*at].opcode == CALL) else { continue };
            if code[call].number != LOOK_UP || code[call].from != 0 {
                continue;
            }
            let (read, again) = follow(&code, call + 1);
            let name = section.name().unwrap_or_default();
            found.push(Reads { at: format!("{name}+{:#x}", call * 8), read, again });
        }
    }
    found
}

fn instructions(code: &[u8]) -> Vec<Instruction> {
    let parse = |bytes: &[u8]| Instruction {
        opcode: bytes[0],
        to: bytes[1] & 15,
        from: bytes[1] >> 4,
        offset: i16::from_le_bytes([bytes[2], bytes[3]]),
        number: i32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]),
    };
    code.chunks_exact(8).map(parse).collect()
}

/// The number of bytes that a load or store instruction moves.
fn width(opcode: u8) -> i32 {
    match opcode >> 3 & 3 {
        0 => 4,
        1 => 2,
        2 => 1,
        _ => 8,
    }
}

/// Follows all paths from an instruction on, with the address of the value in register 0.
fn follow(code: &[Instruction], start: usize) -> (BTreeSet<i32>, BTreeSet<i32>) {
    let (mut read, mut again) = (BTreeSet::new(), BTreeSet::new());
    let state = State { registers: BTreeMap::from([(0, 0)]), stack: BTreeMap::new(), read: BTreeSet::new() };
    let mut seen = HashSet::new();
    let mut ways = vec![(start, state)];
    while let Some((at, mut state)) = ways.pop() {
        // Without the address nothing more of the value is read.
        if state.registers.is_empty() && state.stack.is_empty() || !seen.insert((at, state.clone())) {
            continue;
        }
        let Some(&Instruction { opcode, to, from, offset, number }) = code.get(at) else { continue };
        let mut next = at + 1;
        match opcode {
            EXIT => continue,
            LOAD_WIDE => {
                state.registers.remove(&to);
                next += 1;
            }
            CALL => state.registers.retain(|register, _| *register > 5),
            JUMP => next = at.wrapping_add_signed(isize::from(offset) + 1),
            MOVE => match state.registers.get(&from).copied() {
                // A move of the low half has another opcode.
                Some(to_value) if offset == 0 => drop(state.registers.insert(to, to_value)),
                _ => drop(state.registers.remove(&to)),
            },
            ADD_NUMBER => {
                state.registers.entry(to).and_modify(|at| *at += number);
            }
            _ => match opcode & CLASS {
                CLASS_LOAD => {
                    if let Some(base) = state.registers.get(&from) {
                        for byte in (0..width(opcode)).map(|byte| base + i32::from(offset) + byte) {
                            read.insert(byte);
                            if !state.read.insert(byte) {
                                again.insert(byte);
                            }
                        }
                    }
                    let kept = state.stack.get(&offset).filter(|_| from == FRAME && opcode == LOAD_8);
                    match kept.copied() {
                        Some(to_value) => drop(state.registers.insert(to, to_value)),
                        None => drop(state.registers.remove(&to)),
                    }
                }
                CLASS_STORE_REGISTER if to == FRAME && opcode & MODE == MODE_MEMORY => {
                    match state.registers.get(&from).filter(|_| opcode == STORE_8) {
                        Some(to_value) => drop(state.stack.insert(offset, *to_value)),
                        None => drop(state.stack.remove(&offset)),
                    }
                }
                CLASS_JUMP | CLASS_JUMP32 => {
                    ways.push((at.wrapping_add_signed(isize::from(offset) + 1), state.clone()));
                }
                // Other arithmetic.
                0x04 | 0x07 => drop(state.registers.remove(&to)),
                _ => {}
            },
        }
        ways.push((next, state));
    }
    (read, again)
}

fn encode(opcode: u8, registers: u8, offset: i16, number: i32) -> [u8; 8] {
    let ([a, b], [c, d, e, f]) = (offset.to_le_bytes(), number.to_le_bytes());
    [opcode, registers, a, b, c, d, e, f]
}

/// The test detects a second load of a word by another register, by the stack, and behind a branch.
#[test]
fn a_second_load_is_seen() {
    let load = |register: u8, offset| encode(0x61, register << 4 | 1, offset, 0);
    let exit = encode(EXIT, 0, 0, 0);
    let ways = |code: &[[u8; 8]]| follow(&instructions(&code.concat()), 0);
    let (read, again) = ways(&[load(0, 0), load(0, 4), load(0, 8), exit]);
    assert_eq!((read, again), ((0..12).collect(), BTreeSet::new()));
    let (_, again) = ways(&[load(0, 0), encode(MOVE, 0x06, 0, 0), load(6, 0), exit]);
    assert_eq!(again, (0..4).collect());
    let spilled = [
        encode(STORE_8, 0x0a, -8, 0),
        load(0, 4),
        encode(CALL, 0, 0, LOOK_UP),
        encode(LOAD_8, 0xa7, -8, 0),
        load(7, 4),
        exit,
    ];
    assert_eq!(ways(&spilled).1, (4..8).collect());
    // Each of two branches reads the word: once on each path.
    let branches = [encode(0x15, 0x01, 2, 0), load(0, 8), exit, load(0, 8), exit];
    assert_eq!(ways(&branches), ((8..12).collect(), BTreeSet::new()));
    let both = [encode(0x15, 0x01, 1, 0), load(0, 8), load(0, 8), exit];
    assert_eq!(ways(&both).1, (8..12).collect());
}
