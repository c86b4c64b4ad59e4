//! The text of one manifest: files without an end and texts nested without a limit are refused
//! before they are read or parsed.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read},
    path::Path,
};

#[cfg(unix)]
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};

/// The largest size of a file in bytes: about 300,000 Services.
const LONGEST: u64 = 256 << 20;
/// The deepest nesting of brackets in a file, including those in its strings. Objects have about
/// ten; the time that the YAML parser takes grows with the square.
const DEEPEST: usize = 10_000;

/// Reads a file if it is a regular one, or a link to one.
pub(super) fn read(path: &Path) -> io::Result<String> {
    // Checked before opening: opening a device may have side effects, and opening a FIFO waits for
    // a writer.
    regular(&fs::metadata(path)?)?;
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    options.custom_flags(libc::O_NONBLOCK);
    let file = options.open(path)?;
    // The path may name another file by now.
    regular(&file.metadata()?)?;
    let text = up_to(file, LONGEST)?;
    if depth(&text) > DEEPEST {
        return Err(io::Error::other(format!("more than {DEEPEST} brackets within each other")));
    }
    Ok(text)
}

fn regular(facts: &fs::Metadata) -> io::Result<()> {
    let kind = facts.file_type();
    let what = match kind {
        _ if kind.is_file() => return Ok(()),
        _ if kind.is_dir() => "a folder",
        #[cfg(unix)]
        _ if kind.is_fifo() => "a FIFO",
        #[cfg(unix)]
        _ if kind.is_socket() => "a socket",
        _ => "a device",
    };
    Err(io::Error::other(format!("{what}, and no regular file: take it out of the folder")))
}

fn up_to(file: File, longest: u64) -> io::Result<String> {
    let mut text = String::new();
    // Files of /proc report a size of 0.
    if file.take(longest + 1).read_to_string(&mut text)? as u64 > longest {
        return Err(io::Error::other(format!(
            "longer than {} MiB: divide it into several files",
            longest >> 20
        )));
    }
    Ok(text)
}

/// Returns the largest number of open brackets, whether they are in strings or not.
fn depth(text: &str) -> usize {
    let (mut open, mut most) = (0_usize, 0);
    for byte in text.bytes() {
        match byte {
            b'[' | b'{' => {
                open += 1;
                most = most.max(open);
            }
            b']' | b'}' => open = open.saturating_sub(1),
            _ => {}
        }
    }
    most
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Seek, Write},
        os::unix::{fs::symlink, net::UnixListener},
        sync::mpsc,
        time::Duration,
    };

    use super::*;
    use crate::source::{convert::detail::Detail, manifest::load::load};

    /// Each of these would be read, waited for or parsed without end.
    #[test]
    fn what_is_no_file_with_an_end_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("good.yaml"), "# nothing").unwrap();
        nix::unistd::mkfifo(&path("fifo.yaml"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let _socket = UnixListener::bind(path("socket.yml")).unwrap();
        symlink("/dev/zero", path("zero.json")).unwrap();
        symlink("fifo.yaml", path("link.yaml")).unwrap();
        fs::write(path("deep.yaml"), "[".repeat(200_000)).unwrap();
        fs::write(path("deep.json"), "[".repeat(200_000)).unwrap();
        let (sender, receiver) = mpsc::channel();
        let whole = folder.path().to_owned();
        std::thread::spawn(move || sender.send(load(&whole, Detail::Proxy)));
        let loaded = receiver.recv_timeout(Duration::from_secs(60)).expect("it comes to an end");
        let mistakes = loaded.unwrap_err().0;
        let wanted = [
            "deep.json: more than",
            "deep.yaml: more than",
            "fifo.yaml: a FIFO",
            "link.yaml: a FIFO",
            "socket.yml: a socket",
            "zero.json: a device",
        ];
        assert_eq!(mistakes.len(), wanted.len(), "{mistakes:?}");
        for (mistake, wanted) in mistakes.iter().zip(wanted) {
            assert!(mistake.starts_with(wanted), "{mistake}: not {wanted}");
        }
    }

    #[test]
    fn a_long_file_is_refused() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[b'#'; 1 << 20]).unwrap();
        let rewound = || {
            let mut file = file.try_clone().unwrap();
            file.rewind().unwrap();
            file
        };
        assert_eq!(up_to(rewound(), 1 << 20).unwrap().len(), 1 << 20);
        let message = up_to(rewound(), (1 << 20) - 1).unwrap_err().to_string();
        assert!(message.contains("several files"), "{message}");
    }

    #[test]
    fn brackets_are_counted_where_they_are_open() {
        assert_eq!(depth("[{}, {a: [1]}, []]"), 3);
        assert_eq!(depth("]]] [ ["), 2);
    }
}
