//! `--notice file:PATH`: a file that exists while this node is about to go.

use std::{
    io::{self, Read},
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::{task::spawn_blocking, time::sleep};
use traffic_policy_cluster::source::Leaving;

use super::board::Reporter;

/// The interval at which the file is looked for. A notification would not come from every file
/// system, nor for a folder that does not exist yet.
const INTERVAL: Duration = Duration::from_secs(1);
/// The number of bytes of the file that are read, and shown as the reason.
const MOST: u64 = 200;

/// Looks for the file forever.
pub(super) async fn run(path: PathBuf, reporter: Reporter) {
    loop {
        let looked = path.clone();
        match spawn_blocking(move || look(&looked)).await {
            Ok(Ok(found)) => {
                reporter.well();
                reporter.say(found);
            }
            Ok(Err(error)) => reporter.trouble(error.to_string()),
            Err(error) => reporter.trouble(error.to_string()),
        }
        sleep(INTERVAL).await;
    }
}

/// Returns the reason, which is the first line of the file, if it exists.
fn look(path: &Path) -> io::Result<Option<Leaving>> {
    // A pipe would block; its existence is all that counts.
    let metadata = match path.metadata() {
        Ok(metadata) => metadata,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    if metadata.is_file() {
        match std::fs::File::open(path) {
            Ok(file) => _ = file.take(MOST).read_to_end(&mut bytes)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            // It exists, and that is the news.
            Err(_) => {}
        }
    }
    let text = String::from_utf8_lossy(&bytes);
    let line = text.lines().next().unwrap_or_default().trim();
    let reason = if line.is_empty() { "the file exists" } else { line };
    Ok(Some(Leaving { reason: reason.to_owned(), gone_by: None }))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_comes_and_goes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("later/leaving");
        assert_eq!(look(&path).unwrap(), None, "not even its folder is there");
        fs::create_dir(folder.path().join("later")).unwrap();
        let reason = || look(&path).unwrap().map(|leaving| leaving.reason);
        assert_eq!(reason(), None);
        fs::write(&path, "").unwrap();
        assert_eq!(reason().as_deref(), Some("the file exists"));
        fs::write(&path, format!("  disk fails \nsecond {}\n", "x".repeat(300))).unwrap();
        assert_eq!(reason().as_deref(), Some("disk fails"));
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert_eq!(reason().as_deref(), Some("the file exists"), "whatever it is");
        fs::remove_dir(&path).unwrap();
        assert_eq!(reason(), None);
    }
}
