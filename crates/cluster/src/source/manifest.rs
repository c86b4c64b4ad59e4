//! A folder of manifests instead of an API server.

mod load;

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use file_id::{FileId, get_file_id};
use notify::{EventKind, RecursiveMode, Watcher, event::AccessKind};
use tokio::{
    sync::mpsc,
    task::{JoinError, JoinHandle, JoinSet, spawn_blocking},
    time::{Instant, sleep, sleep_until, timeout},
};
use tracing::debug;

pub use self::load::Mistakes;
use super::{
    batch::{Batch, QUEUE, Source},
    convert::detail::Detail,
    events::EventRecorder,
    node_addresses::NodeAddresses,
    stamp::Stamp,
    status::StatusWriter,
};
use crate::model::object::Node;

/// The quiet time after which changes are read: changes come in groups (a copy of many files, an
/// editor that renames).
const QUIET: Duration = Duration::from_millis(50);
/// The longest delay of reading after the first change.
const PATIENCE: Duration = Duration::from_millis(500);
/// The interval at which the folder is checked without a notification: for file systems without
/// notifications, and links that lead out of the folder.
const POLL: Duration = Duration::from_secs(3);

/// The time within which checking and reading the files should end. Otherwise the disk or the
/// network behind it hangs: this is reported, and the source keeps waiting, since the thread cannot
/// be stopped.
const LONG: Duration = Duration::from_secs(60);

/// A source that reads `*.yaml`, `*.yml` and `*.json` of one folder: Services, EndpointSlices,
/// Nodes, ServiceCIDRs and Leases, in the form that `kubectl` takes. The folder counts as a whole:
/// if one file is broken, the last good state of all of it stays.
#[derive(Clone, Debug)]
pub struct Manifests {
    pub folder: PathBuf,
    /// The name of this node. If the folder has no such Node, one without addresses is assumed,
    /// because with manifests no other component could register it.
    pub node_name: String,
}

/// Reads a folder once, as [`Manifests`] does, with all that the judgement of a cluster needs.
///
/// # Errors
///
/// Anything in it is broken; the error names all mistakes.
pub fn read_cluster(folder: &Path) -> Result<Batch, Mistakes> {
    Ok(load::load(folder, Detail::Cluster)?.batch())
}

/// Reads and follows a folder as [`Manifests`] does, with all that the judgement of a cluster
/// needs.
#[must_use]
pub fn follow_cluster(folder: PathBuf) -> Source {
    start(folder.clone(), move || read_cluster(&folder))
}

impl Manifests {
    /// Starts reading and following the folder. A folder that is missing or broken is reported in
    /// the status and in the log, and read once it is good.
    #[must_use]
    pub fn start(self) -> Source {
        let folder = self.folder.clone();
        start(folder, move || self.read())
    }

    /// Reads the folder once.
    ///
    /// # Errors
    ///
    /// Anything in it is broken; the error names all mistakes.
    pub fn read(&self) -> Result<Batch, Mistakes> {
        let mut objects = load::load(&self.folder, Detail::Proxy)?;
        if !objects.nodes.iter().any(|node| node.name == self.node_name) {
            objects.nodes.push(Node { name: self.node_name.clone(), ..Node::default() });
        }
        Ok(objects.batch())
    }
}

fn start(folder: PathBuf, read: impl Fn() -> Result<Batch, Mistakes> + Send + Sync + 'static) -> Source {
    let (sender, updates) = mpsc::channel(QUEUE);
    let (writer, status) = StatusWriter::new();
    let mut tasks = JoinSet::new();
    tasks.spawn(follow(folder, Arc::new(read), sender, writer));
    Source {
        updates,
        status,
        events: EventRecorder::nowhere(),
        filled: Arc::default(),
        condition: None,
        node_addresses: NodeAddresses::in_index(),
        tasks,
    }
}

async fn follow<R>(folder: PathBuf, read: Arc<R>, sender: mpsc::Sender<Batch>, status: StatusWriter)
where
    R: Fn() -> Result<Batch, Mistakes> + Send + Sync + 'static,
{
    status.waiting("manifests");
    let mut notices = Notices::default();
    let mut seen = None;
    let mut synced = false;
    let mut told = true;
    loop {
        notices.renew(&folder, &status);
        let looking = folder.clone();
        let looked = patient(spawn_blocking(move || Look::at(&looking)), &folder, LONG, &status).await;
        let look = match looked {
            Ok(look) => look,
            Err(error) => {
                status.mistake("manifests", format!("the folder could not be read: {error}"));
                Look::default()
            }
        };
        // Without a notification, a folder is read again only if it looks different.
        if told || seen.as_ref() != Some(&look) {
            let read = Arc::clone(&read);
            match patient(spawn_blocking(move || read()), &folder, LONG, &status).await {
                Ok(Ok(batch)) => {
                    status.well("manifests", "all manifests are readable again");
                    status.contact();
                    status.sending();
                    if sender.send(batch).await.is_err() {
                        return;
                    }
                    synced = true;
                    status.synced();
                }
                Ok(Err(mistakes)) => {
                    let keeps =
                        if synced { "the last good state stays" } else { "waiting, nothing is written" };
                    status.mistake("manifests", format!("{mistakes} ({keeps})"));
                }
                Err(error) => {
                    status.mistake("manifests", format!("reading failed: {error}"));
                }
            }
            seen = Some(look);
        } else if synced {
            status.contact();
        }
        told = notices.wait().await;
    }
}

/// Waits for a task that touches the files, and reports it if it takes too long.
async fn patient<T>(
    mut task: JoinHandle<T>,
    folder: &Path,
    long: Duration,
    status: &StatusWriter,
) -> Result<T, JoinError> {
    // The subject starts like that of mistakes in the files: there may be Services that are not
    // known.
    const SUBJECT: &str = "manifests in time";
    if let Ok(done) = timeout(long, &mut task).await {
        return done;
    }
    let (folder, seconds) = (folder.display(), long.as_secs());
    status.trouble(
        SUBJECT,
        format!("{folder} has been read for {seconds} s: no change in it is followed until that ends"),
    );
    let done = task.await;
    status.well(SUBJECT, "the folder can be read again");
    done
}

/// Paths and metadata of the files, to detect changes without reading them.
#[derive(Debug, Default, PartialEq, Eq)]
struct Look(Vec<(PathBuf, Option<Stamp>)>);

impl Look {
    fn at(folder: &Path) -> Self {
        let files = load::files(folder).unwrap_or_default();
        Self(
            files
                .into_iter()
                .map(|file| {
                    let stamp = Stamp::of(&file).ok();
                    (file, stamp)
                })
                .collect(),
        )
    }
}

/// The kernel's notifications of changes in the folder.
#[derive(Default)]
struct Notices {
    watched: Option<Watched>,
}

struct Watched {
    /// The identity: a folder that was replaced by another needs a new watch.
    folder: FileId,
    receiver: mpsc::Receiver<()>,
    _watcher: notify::RecommendedWatcher,
}

impl Notices {
    fn renew(&mut self, folder: &Path, status: &StatusWriter) {
        let Ok(identity) = get_file_id(folder) else {
            self.watched = None;
            return;
        };
        if self.watched.as_ref().is_some_and(|watched| watched.folder == identity) {
            return;
        }
        match Watched::new(folder, identity) {
            Ok(watched) => {
                status.well("notices", "changes of the folder are announced again");
                self.watched = Some(watched);
            }
            Err(error) => status.trouble(
                "notices",
                format!("changes are not announced ({error}); looking every {} s instead", POLL.as_secs()),
            ),
        }
    }

    /// Waits until the next check is due. Returns whether a change was announced.
    async fn wait(&mut self) -> bool {
        let Some(watched) = &mut self.watched else {
            sleep(POLL).await;
            return false;
        };
        if !matches!(timeout(POLL, watched.receiver.recv()).await, Ok(Some(()))) {
            return false;
        }
        let patience = sleep_until(Instant::now() + PATIENCE);
        tokio::pin!(patience);
        loop {
            tokio::select! {
                () = &mut patience => return true,
                () = sleep(QUIET) => return true,
                _ = watched.receiver.recv() => {}
            }
        }
    }
}

impl Watched {
    fn new(folder: &Path, identity: FileId) -> io::Result<Self> {
        let (sender, receiver) = mpsc::channel(1);
        let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            // Reading the files opens and closes them; that must not trigger reading them again.
            let reading = matches!(&event, Ok(event) if matches!(event.kind, EventKind::Access(kind)
                if !matches!(kind, AccessKind::Close(notify::event::AccessMode::Write))));
            if !reading {
                debug!(?event, "notice");
                // A full channel means that a notification is already waiting.
                let _ = sender.try_send(());
            }
        })
        .map_err(io::Error::other)?;
        watcher.watch(folder, RecursiveMode::NonRecursive).map_err(io::Error::other)?;
        Ok(Self { folder: identity, receiver, _watcher: watcher })
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;
    use crate::model::{Index, NodeInput};

    fn service(name: &str, ip: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\n\
             spec: {{clusterIP: {ip}, ports: [{{port: 80}}]}}\n"
        )
    }

    struct Followed {
        folder: tempfile::TempDir,
        source: Source,
        index: Index,
    }

    impl Followed {
        fn start(folder: tempfile::TempDir) -> Self {
            let source = Manifests { folder: folder.path().to_owned(), node_name: "here".to_owned() }.start();
            Self { folder, source, index: Index::default() }
        }

        async fn expect(&mut self, services: &[&str]) {
            let wanted: Vec<_> = services.iter().map(|name| format!("default/{name}")).collect();
            let input = NodeInput { node_name: "here".to_owned(), ipv4: true, ..NodeInput::default() };
            let waiting = async {
                loop {
                    let _ = self.index.update(&input);
                    let found: Vec<_> =
                        self.index.desired().ports.keys().map(|key| key.service.to_string()).collect();
                    if found == wanted && self.index.is_synced() {
                        return;
                    }
                    self.source.next().await.unwrap().apply(&mut self.index);
                }
            };
            timeout(POLL * 3, waiting).await.expect("the folder's state arrives");
        }
    }

    #[tokio::test]
    async fn changes_are_followed_and_a_broken_file_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_owned();
        fs::write(path.join("a.yaml"), service("a", "10.96.0.1")).unwrap();
        let mut followed = Followed::start(folder);
        followed.expect(&["a"]).await;
        // Reading the files does not trigger reading them again.
        assert!(timeout(PATIENCE * 2, followed.source.next()).await.is_err());

        // Editors save like this: a temporary file, renamed over the old one.
        fs::write(path.join(".b.yaml.tmp"), service("b", "10.96.0.2")).unwrap();
        fs::rename(path.join(".b.yaml.tmp"), path.join("b.yaml")).unwrap();
        followed.expect(&["a", "b"]).await;

        // A broken file keeps even the deletion of another one from counting.
        fs::write(path.join("b.yaml"), "kind: [").unwrap();
        fs::remove_file(path.join("a.yaml")).unwrap();
        let mut status = followed.source.status();
        let broken = status.wait_for(|status| status.errors.contains_key("manifests")).await.unwrap();
        assert!(broken.errors["manifests"].contains("b.yaml, document 1"), "{broken:?}");
        assert!(broken.errors["manifests"].contains("last good state stays"), "{broken:?}");
        assert!(followed.source.try_next().is_none());

        fs::write(path.join("b.yaml"), service("b", "10.96.0.2")).unwrap();
        followed.expect(&["b"]).await;
        assert!(status.get().errors.is_empty());
        drop(followed.folder);
    }

    #[tokio::test]
    async fn a_broken_start_is_told_and_nothing_is_given() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a.yaml"), "kind: [").unwrap();
        let mut followed = Followed::start(folder);
        let mut status = followed.source.status();
        let broken = status.wait_for(|status| !status.errors.is_empty()).await.unwrap();
        assert!(broken.errors["manifests"].contains("nothing is written"), "{broken:?}");
        assert!(!broken.synced);
        assert!(followed.source.try_next().is_none());
        fs::write(followed.folder.path().join("a.yaml"), service("a", "10.96.0.1")).unwrap();
        followed.expect(&["a"]).await;
    }

    #[tokio::test]
    async fn reading_without_end_is_told() {
        let (writer, mut status) = StatusWriter::new();
        let (release, wait) = std::sync::mpsc::channel::<()>();
        let task = spawn_blocking(move || wait.recv().is_err());
        let told = tokio::spawn(async move {
            patient(task, Path::new("/manifests"), Duration::from_millis(10), &writer).await.unwrap()
        });
        let said = status.wait_for(|status| !status.errors.is_empty()).await.unwrap();
        assert!(said.is_blind(), "{said:?}");
        let text = &said.errors["manifests in time"];
        assert!(text.contains("/manifests") && text.contains("no change"), "{text}");
        drop(release);
        assert!(told.await.unwrap());
        assert!(status.get().errors.is_empty());
    }

    #[tokio::test]
    async fn a_config_map_is_swapped_as_a_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_owned();
        for (version, name) in [("..1", "a"), ("..2", "b")] {
            fs::create_dir(path.join(version)).unwrap();
            fs::write(path.join(version).join("s.yaml"), service(name, "10.96.0.1")).unwrap();
        }
        symlink("..1", path.join("..data")).unwrap();
        symlink("..data/s.yaml", path.join("s.yaml")).unwrap();
        let mut followed = Followed::start(folder);
        followed.expect(&["a"]).await;
        symlink("..2", path.join("..data_tmp")).unwrap();
        fs::rename(path.join("..data_tmp"), path.join("..data")).unwrap();
        followed.expect(&["b"]).await;
    }

    #[tokio::test]
    async fn a_folder_may_come_later_and_be_replaced() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("manifests");
        let source = Manifests { folder: path.clone(), node_name: "here".to_owned() }.start();
        let mut followed = Followed { folder: parent, source, index: Index::default() };
        let mut status = followed.source.status();
        status.wait_for(|status| !status.errors.is_empty()).await.unwrap();
        fs::create_dir(&path).unwrap();
        fs::write(path.join("a.yaml"), service("a", "10.96.0.1")).unwrap();
        followed.expect(&["a"]).await;

        let other = followed.folder.path().join("other");
        fs::create_dir(&other).unwrap();
        fs::write(other.join("b.yaml"), service("b", "10.96.0.1")).unwrap();
        fs::rename(&path, followed.folder.path().join("old")).unwrap();
        fs::rename(&other, &path).unwrap();
        followed.expect(&["b"]).await;
    }
}
