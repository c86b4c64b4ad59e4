//! Another build of the agent: a copy of its binary in which programs of the embedded BPF object
//! have two independent instructions swapped. Same maps, same behaviour, other instructions: to the
//! kernel, and to the agent, these are other programs.

use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use object::{Object, ObjectSection, ObjectSymbol, SectionKind};

/// The length of an instruction in bytes.
const INSTRUCTION: usize = 8;
/// `struct Elf64_Ehdr`: e_ident of a little-endian 64-bit file, and e_machine with the number of
/// BPF.
const ELF: &[u8] = b"\x7fELF\x02\x01\x01";
const MACHINE: usize = 18;
const BPF: [u8; 2] = [247, 0];
/// Opcodes: moves of a register or a number, of 64 and 32 bits.
const MOVES: [u8; 4] = [0xbf, 0xb7, 0xbc, 0xb4];
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;

/// Writes the other build; returns the number of programs and functions that differ in it.
///
/// # Errors
/// The binary holds no BPF object, or none of its programs has such a pair.
pub fn write(agent: &Path, copy: &Path) -> Result<usize> {
    let mut binary = fs::read(agent).with_context(|| agent.display().to_string())?;
    let start = memchr::memmem::find_iter(&binary, ELF)
        .find(|at| binary.get(at + MACHINE..at + MACHINE + 2) == Some(&BPF))
        .with_context(|| format!("{} holds no BPF object", agent.display()))?;
    let pairs = pairs(&binary[start..])?;
    ensure!(!pairs.is_empty(), "no program has two moves that can be swapped");
    for pair in &pairs {
        let (first, second) = binary[start + pair..start + pair + 2 * INSTRUCTION].split_at_mut(INSTRUCTION);
        first.swap_with_slice(second);
    }
    fs::write(copy, binary).with_context(|| copy.display().to_string())?;
    fs::set_permissions(copy, fs::Permissions::from_mode(0o755))?;
    Ok(pairs.len())
}

/// The offsets in the object of the first pair of each program, and of each function that programs
/// call.
fn pairs(object: &[u8]) -> Result<Vec<usize>> {
    let file = object::File::parse(object).context("the BPF object is damaged")?;
    let mut found = Vec::new();
    for section in file.sections().filter(|section| section.kind() == SectionKind::Text) {
        let code = section.data()?;
        let starts: BTreeSet<usize> = file
            .symbols()
            .filter(|symbol| symbol.section_index() == Some(section.index()))
            .map(|symbol| symbol.address() as usize / INSTRUCTION)
            .collect();
        let mut entered: HashSet<usize> = starts.iter().copied().collect();
        entered.extend(section.relocations().map(|(at, _)| at as usize / INSTRUCTION));
        entered.extend(targets(code));
        let (offset, _) = section.file_range().context("a section without content")?;
        let ends = starts.iter().copied().skip(1).chain([code.len() / INSTRUCTION]);
        for (start, end) in starts.iter().copied().zip(ends) {
            let place = (start + 1..end)
                .find(|at| !entered.contains(at) && !entered.contains(&(at - 1)) && are_apart(code, at - 1));
            found.extend(place.map(|at| offset as usize + (at - 1) * INSTRUCTION));
        }
    }
    Ok(found)
}

/// The instructions to which others jump.
fn targets(code: &[u8]) -> impl Iterator<Item = usize> + '_ {
    code.chunks_exact(INSTRUCTION).enumerate().filter_map(|(at, instruction)| {
        let opcode = instruction[0];
        let jumps = matches!(opcode & 7, 5 | 6) && ![CALL, EXIT].contains(&opcode);
        let short = i32::from(i16::from_le_bytes([instruction[2], instruction[3]]));
        // The unconditional jump of class JMP32 has its distance in the other field.
        let long = i32::from_le_bytes([instruction[4], instruction[5], instruction[6], instruction[7]]);
        let distance = if opcode == 6 { long } else { short };
        jumps.then(|| at.checked_add_signed(distance as isize + 1)).flatten()
    })
}

/// Whether an instruction and the next are moves, neither of which reads or writes what the other
/// writes.
fn are_apart(code: &[u8], at: usize) -> bool {
    let instruction = |at: usize| &code[at * INSTRUCTION..(at + 1) * INSTRUCTION];
    let (first, second) = (instruction(at), instruction(at + 1));
    let is_move = |instruction: &[u8]| MOVES.contains(&instruction[0]);
    let (to, from) = (|i: &[u8]| i[1] & 15, |i: &[u8]| i[1] >> 4);
    // The source field of a move of a number is 0, which is register 0: compared all the same.
    is_move(first)
        && is_move(second)
        && first != second
        && to(first) != to(second)
        && to(first) != from(second)
        && to(second) != from(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    const R1_IS_1: [u8; 8] = [0xb7, 1, 0, 0, 1, 0, 0, 0];
    const R2_IS_R1: [u8; 8] = [0xbf, 0x12, 0, 0, 0, 0, 0, 0];
    const R3_IS_2: [u8; 8] = [0xb7, 3, 0, 0, 2, 0, 0, 0];
    const JUMP_BACK: [u8; 8] = [5, 0, 0xfe, 0xff, 0, 0, 0, 0];

    #[test]
    fn what_depends_on_another_is_not_swapped() {
        assert!(are_apart(&[R1_IS_1, R3_IS_2].concat(), 0));
        assert!(!are_apart(&[R1_IS_1, R2_IS_R1].concat(), 0), "reads what is written");
        assert!(!are_apart(&[R2_IS_R1, R1_IS_1].concat(), 0), "writes what is read");
        assert!(!are_apart(&[R1_IS_1, R1_IS_1].concat(), 0), "the same");
        assert!(!are_apart(&[R1_IS_1, JUMP_BACK].concat(), 0), "a jump");
    }

    #[test]
    fn targets_of_jumps() {
        let code = [R1_IS_1, R3_IS_2, JUMP_BACK].concat();
        assert_eq!(targets(&code).collect::<Vec<_>>(), [1]);
    }
}
