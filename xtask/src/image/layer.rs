//! The one layer of the image: the agent. Times, owners and order are fixed, so that the same
//! program gives the same bytes.

use std::io::{self, Write};

use anyhow::{Context, Result};
use flate2::{Compression, GzBuilder};
use sha2::{Digest as _, Sha256};
use tar::{Builder, EntryType, Header};

/// The name of the program, which is at the root of the image.
pub(super) const PROGRAM: &str = "traffic-policy-agent";

#[derive(Debug)]
pub(super) struct Layer {
    /// The layer, compressed.
    pub(super) gzip: Vec<u8>,
    /// The digest of the uncompressed layer, by which an image's configuration refers to it.
    pub(super) diff_id: String,
    /// The size of the program in bytes.
    pub(super) program: usize,
}

impl Layer {
    pub(super) fn of(program: &[u8]) -> Result<Self> {
        let mut tar = Builder::new(Vec::new());
        append(&mut tar, PROGRAM, program, 0o755).context("packing the layer failed")?;
        let tar = tar.into_inner().context("packing the layer failed")?;
        let diff_id = digest(&tar);
        // The header has neither a time nor a file name.
        let mut gzip = GzBuilder::new().write(Vec::new(), Compression::best());
        gzip.write_all(&tar).context("compressing the layer failed")?;
        let gzip = gzip.finish().context("compressing the layer failed")?;
        Ok(Self { gzip, diff_id, program: program.len() })
    }
}

/// Appends a file that is owned by root and dates from 1970.
pub(super) fn append(tar: &mut Builder<Vec<u8>>, name: &str, content: &[u8], mode: u32) -> io::Result<()> {
    let mut header = Header::new_ustar();
    header.set_entry_type(EntryType::Regular);
    header.set_size(content.len() as u64);
    header.set_mode(mode);
    for set in [Header::set_uid, Header::set_gid, Header::set_mtime] {
        set(&mut header, 0);
    }
    tar.append_data(&mut header, name, content)
}

/// Formats a digest as OCI does.
pub(super) fn digest(bytes: &[u8]) -> String {
    let hash = Sha256::digest(bytes);
    let hex: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use flate2::read::GzDecoder;
    use tar::Archive;

    use super::*;

    #[test]
    fn digests_are_those_of_sha256() {
        let empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(digest(b""), empty);
    }

    #[test]
    fn the_program_alone_and_of_root() {
        let layer = Layer::of(b"\x7fELF").unwrap();
        let mut unpacked = Vec::new();
        GzDecoder::new(&layer.gzip[..]).read_to_end(&mut unpacked).unwrap();
        assert_eq!(layer.diff_id, digest(&unpacked));
        let mut archive = Archive::new(&unpacked[..]);
        let entries: Vec<_> = archive.entries().unwrap().map(Result::unwrap).collect();
        assert_eq!(entries.len(), 1);
        let header = entries[0].header();
        assert_eq!(header.path().unwrap().to_str(), Some(PROGRAM));
        assert_eq!(header.mode().unwrap(), 0o755);
        let numbers = [header.uid(), header.gid(), header.mtime()].map(Result::unwrap);
        assert_eq!(numbers, [0; 3]);
    }
}
