//! Support for frames of several buffers in XDP, such as jumbo frames: the programs that accept
//! them (BPF_F_XDP_HAS_FRAGS), and the array of programs that they jump to.

use std::{borrow::Cow, fs, io::ErrorKind, path::Path};

use anyhow::{Context as _, Result};

use super::attach::Mode;

/// The section name of XDP programs for which aya sets BPF_F_XDP_HAS_FRAGS: they accept frames of
/// several buffers.
const WITH_FRAGS: &[u8] = b"xdp.frags\0";
/// The array of the programs that XDP programs jump to. Either all programs of an array have that
/// flag, or none has it: the kernel refuses others (`bpf_prog_map_compatible`).
const XDP_CALLS: &str = "tp_xdp_calls";
/// The name of the pin of this array if its programs do not have the flag.
const XDP_CALLS_WITHOUT_FRAGS: &str = "tp_xdp_calls_skb";

/// Whether the XDP programs of a mode accept frames of several buffers. Those in the stack (generic
/// XDP) do not: for programs that do, the kernel copies a packet that has too little headroom
/// (`skb_pp_cow_data` in net/core/skbuff.c), and the copy's `mac_len` is 0, so that TC finds no
/// Ethernet header (seen on Linux 6.18).
fn takes_frags(mode: Mode) -> bool {
    mode != Mode::XdpGeneric
}

/// Returns the name of the pin of a map.
pub fn pin(map: &str, mode: Mode) -> &str {
    if map == XDP_CALLS && !takes_frags(mode) { XDP_CALLS_WITHOUT_FRAGS } else { map }
}

/// Removes the pin of the array that programs of the other kind jump to. None of them may be
/// attached any more: the kernel empties an array of programs that has neither a pin nor a
/// descriptor.
pub fn forget_other_kind(folder: &Path, mode: Mode) -> Result<()> {
    let other = if takes_frags(mode) { XDP_CALLS_WITHOUT_FRAGS } else { XDP_CALLS };
    match fs::remove_file(folder.join(other)) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("{} cannot be removed", folder.join(other).display()))
        }
        _ => Ok(()),
    }
}

/// Returns the object file with the XDP programs of a mode.
pub fn object(bytes: &[u8], mode: Mode) -> Cow<'_, [u8]> {
    if takes_frags(mode) { Cow::Borrowed(bytes) } else { Cow::Owned(without_frags(bytes)) }
}

/// Returns the object file with sections `xdp` instead of `xdp.frags`: aya sets the flag by the
/// name of the section.
fn without_frags(object: &[u8]) -> Vec<u8> {
    let mut object = object.to_vec();
    let mut at = 0;
    while let Some(found) = object[at..].windows(WITH_FRAGS.len()).position(|bytes| bytes == WITH_FRAGS) {
        // A zero byte ends the name after `xdp`.
        object[at + found + 3] = 0;
        at += found + WITH_FRAGS.len();
    }
    object
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;
    use crate::dataplane::bpf::object::object_bytes;

    #[test]
    fn without_frags_only_the_section_differs() {
        let parse = |object: &[u8]| aya_obj::Object::parse(object).unwrap();
        let (with, without) = (parse(object_bytes()), parse(&without_frags(object_bytes())));
        let sections = |object: &aya_obj::Object| {
            let of = |(name, program): (&String, &aya_obj::Program)| (name.clone(), program.section.clone());
            object.programs.iter().map(of).collect::<HashMap<_, _>>()
        };
        let frags = |section: &aya_obj::ProgramSection| {
            matches!(section, aya_obj::ProgramSection::Xdp { frags: true, .. })
        };
        assert!(frags(&sections(&with)["tp_xdp_ingress"]) && !sections(&without).values().any(frags));
        // Instructions do not implement `PartialEq`.
        let instructions = |object: &aya_obj::Object| -> Vec<String> {
            let all = object.functions.values();
            all.map(|function| format!("{} {:?}", function.name, function.instructions)).collect()
        };
        assert!(instructions(&with).len() >= with.programs.len());
        // `assert_eq` would print megabytes.
        assert!(instructions(&with) == instructions(&without), "other instructions");
        assert_eq!(with.programs.len(), without.programs.len());
        assert_eq!(with.maps.keys().collect::<HashSet<_>>(), without.maps.keys().collect::<HashSet<_>>());
    }

    #[test]
    fn each_kind_of_program_has_an_array_of_its_own() {
        let modes = [Mode::Xdp, Mode::XdpGeneric];
        assert_eq!(modes.map(|mode| pin(XDP_CALLS, mode)), [XDP_CALLS, XDP_CALLS_WITHOUT_FRAGS]);
        assert_eq!(modes.map(|mode| pin("tp_flows4", mode)), ["tp_flows4"; 2]);
        for (mode, other) in [(Mode::Xdp, Mode::XdpGeneric), (Mode::XdpGeneric, Mode::Xdp)] {
            let folder = tempfile::tempdir().unwrap();
            let pins = [mode, other].map(|mode| folder.path().join(pin(XDP_CALLS, mode)));
            for path in pins.iter().chain([&folder.path().join("tp_flows4")]) {
                fs::write(path, "").unwrap();
            }
            forget_other_kind(folder.path(), mode).unwrap();
            assert_eq!(pins.map(|pin| pin.exists()), [true, false], "{mode:?}");
            assert!(folder.path().join("tp_flows4").exists());
            forget_other_kind(folder.path(), mode).unwrap();
        }
        let not_a_folder = forget_other_kind(Path::new("/proc/version"), Mode::Xdp).unwrap_err().to_string();
        assert!(not_a_folder.contains("cannot be removed"), "{not_a_folder}");
    }
}
