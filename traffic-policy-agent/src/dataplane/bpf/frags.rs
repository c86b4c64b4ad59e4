//! Frames of several buffers in XDP: jumbo frames, where a driver has them.

use std::{borrow::Cow, fs, io::ErrorKind, path::Path};

use anyhow::{Context as _, Result};

use super::attach::Mode;

/// Section of the XDP programs, which says that they take frames of several buffers (BPF_F_XDP_HAS_FRAGS).
const WITH_FRAGS: &[u8] = b"xdp.frags\0";
/// The programs that others jump to in XDP. The kernel lets an array have programs with that flag, or without it.
const XDP_CALLS: &str = "tp_xdp_calls";
/// Pin of those without it.
const XDP_CALLS_WITHOUT_FRAGS: &str = "tp_xdp_calls_skb";

/// Whether the programs say that they take frames of several buffers. Not in the stack: for such programs the kernel copies a packet
/// that has too little room before it (`skb_pp_cow_data` in net/core/skbuff.c), and the copy's `mac_len` is 0, so that TC finds no
/// Ethernet header (seen on Linux 6.18).
fn takes_frags(mode: Mode) -> bool {
    mode != Mode::XdpGeneric
}

/// Name of a map's pin.
pub fn pin(map: &str, mode: Mode) -> &str {
    if map == XDP_CALLS && !takes_frags(mode) { XDP_CALLS_WITHOUT_FRAGS } else { map }
}

/// Removes what programs of the other kind have jumped to, once none of them is attached any more.
///
/// # Errors
/// A pin that cannot be removed.
pub fn forget_other_kind(folder: &Path, mode: Mode) -> Result<()> {
    let other = if takes_frags(mode) { XDP_CALLS_WITHOUT_FRAGS } else { XDP_CALLS };
    match fs::remove_file(folder.join(other)) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("{} cannot be removed", folder.join(other).display()))
        }
        _ => Ok(()),
    }
}

/// The object with XDP programs of that kind.
pub fn object(bytes: &[u8], mode: Mode) -> Cow<'_, [u8]> {
    if takes_frags(mode) { Cow::Borrowed(bytes) } else { Cow::Owned(without_frags(bytes)) }
}

/// aya goes by the name of their section.
fn without_frags(object: &[u8]) -> Vec<u8> {
    let mut object = object.to_vec();
    let mut at = 0;
    while let Some(found) = object[at..].windows(WITH_FRAGS.len()).position(|bytes| bytes == WITH_FRAGS) {
        // `xdp` ends there.
        object[at + found + 3] = 0;
        at += found + WITH_FRAGS.len();
    }
    object
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::dataplane::bpf::loader::object_bytes;

    #[test]
    fn without_frags_only_the_section_differs() {
        let sections = |object: &[u8]| {
            let object = aya_obj::Object::parse(object).unwrap();
            let of = |(name, program): (&String, &aya_obj::Program)| (name.clone(), program.section.clone());
            object.programs.iter().map(of).collect::<HashMap<_, _>>()
        };
        let (with, without) = (sections(object_bytes()), sections(&without_frags(object_bytes())));
        assert_eq!(with.len(), without.len());
        let frags = |section: &aya_obj::ProgramSection| {
            matches!(section, aya_obj::ProgramSection::Xdp { frags: true, .. })
        };
        assert!(frags(&with["tp_xdp_ingress"]) && !without.values().any(frags));
    }
}
