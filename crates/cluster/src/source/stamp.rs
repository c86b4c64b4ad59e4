//! A stamp of a file: it tells without reading whether the file has changed.

use std::{fs, io, path::Path, time::SystemTime};

use file_id::{FileId, get_file_id};

/// The identity of a file (device and inode), its length in bytes and its modification time.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Stamp(FileId, u64, SystemTime);

impl Stamp {
    /// Asks the file system; of a link, the file that it leads to.
    ///
    /// # Errors
    ///
    /// There is no such file, or it cannot be asked about.
    pub(super) fn of(file: &Path) -> io::Result<Self> {
        let data = fs::metadata(file)?;
        Ok(Self(get_file_id(file)?, data.len(), data.modified()?))
    }
}
