//! One emulated machine: qemu with a kernel, a root disk and a job, from power-on to power-off.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail};

use super::{Workshop, arch::Arch, kernel::Kernel, root::Root};
use crate::{cargo, files};

/// The memory in mebibytes: enough for the largest suite and its page cache.
const MEMORY: u32 = 4096;
/// The number of processors of a machine that has the host for itself: a single one would not
/// exercise forwarding between two.
pub(super) const PROCESSORS: u32 = 2;

/// The speed of a machine's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Clock {
    /// The clock follows the host's.
    Host,
    /// The clock advances by a nanosecond with each instruction. The machine is emulated, whether
    /// or not the host has KVM, by one thread for all processors.
    Instructions,
}

/// A machine to start.
pub(super) struct Machine<'a> {
    pub(super) arch: Arch,
    pub(super) kernel: &'a Kernel,
    pub(super) root: &'a Root,
    pub(super) processors: u32,
    pub(super) clock: Clock,
    /// The script that the first process executes; the machine stops after it.
    pub(super) job: String,
    /// Further arguments of qemu, for network devices.
    pub(super) devices: Vec<String>,
    /// The name of the network namespace in which qemu runs and which has its taps.
    pub(super) netns: Option<String>,
    /// The folder of this machine's files.
    pub(super) folder: PathBuf,
}

impl<'a> Machine<'a> {
    /// Describes a machine without network devices that has the host for itself. Its folder is
    /// named by its purpose and this process.
    pub(super) fn new(
        workshop: &'a Workshop,
        kernel: &'a Kernel,
        root: &'a Root,
        job: String,
        purpose: &str,
    ) -> Self {
        Self {
            arch: workshop.arch,
            kernel,
            root,
            processors: PROCESSORS,
            clock: Clock::Host,
            job,
            devices: Vec::new(),
            netns: None,
            folder: workshop.folder.join(format!("runs/{purpose}-{}", std::process::id())),
        }
    }
}

impl Machine<'_> {
    /// Writes the initial RAM disk with the job in it, and returns the command that starts the
    /// machine.
    pub(super) fn command(&self) -> Result<Command> {
        files::make_folder(&self.folder)?;
        let initrd = self.initrd()?;
        let qemu = self.arch.qemu();
        let mut command = match &self.netns {
            None => Command::new("setpriv"),
            Some(_) => cargo::privileged("setpriv").context("neither root nor sudo")?,
        };
        // The machine stops with this program, even if that is killed.
        command.args(["--pdeathsig", "KILL"]);
        if let Some(name) = &self.netns {
            command.args(["nsenter", &format!("--net=/run/netns/{name}")]);
        }
        command.arg(qemu);
        command.args(self.arch.machine());
        command.args(["-smp", &self.processors.to_string(), "-m", &MEMORY.to_string()]);
        match self.clock {
            Clock::Host => command.args(["-accel", if self.arch.has_kvm() { "kvm" } else { "tcg" }]),
            Clock::Instructions => {
                command.args(["-accel", "tcg,thread=single", "-icount", "shift=0,sleep=off,align=off"])
            }
        };
        command.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
        command.arg("-kernel").arg(&self.kernel.image).arg("-initrd").arg(&initrd);
        // The kernel prints only messages that end the machine; `dmesg` has the rest.
        let console = self.arch.console();
        command.args(["-append", &format!("console={console} quiet loglevel=2 panic=-1 net.ifnames=0")]);
        for (number, disk) in [&self.root.image, &self.kernel.modules_image].into_iter().enumerate() {
            // Writes go to a private temporary file of qemu.
            let file = disk.display();
            command.args(["-drive", &format!("file={file},format=raw,if=none,id=disk{number},snapshot=on")]);
            command.args(["-device", &format!("virtio-blk-pci,drive=disk{number}")]);
        }
        command.args(["-device", "virtio-rng-pci"]);
        command.args(&self.devices);
        Ok(command)
    }

    fn initrd(&self) -> Result<PathBuf> {
        let path = self.folder.join("initrd");
        let job = self.folder.join("job");
        fs::write(&job, &self.job).with_context(|| format!("{} cannot be written", job.display()))?;
        // The kernel unpacks consecutive archives: see initramfs/buffer-format in its
        // documentation.
        let mut archive = fs::read(&self.kernel.initrd)
            .with_context(|| format!("{} cannot be read", self.kernel.initrd.display()))?;
        archive.extend(super::cpio::archive(&self.folder, &["job"])?);
        fs::write(&path, archive).with_context(|| format!("{} cannot be written", path.display()))?;
        Ok(path)
    }

    /// Runs the job, and passes on each line of the console, which is also stored in a file. A
    /// machine that prints nothing is restarted: emulated processors occasionally hang before the
    /// kernel has a console.
    ///
    /// # Errors
    /// qemu cannot be started, the machine never prints anything, or it stops before its job is
    /// done; the error has the last lines of the console.
    pub(super) fn run(&self, mut line: impl FnMut(&str)) -> Result<()> {
        for _ in 1..BOOTS {
            if self.run_once(&mut line)? == Ended::Silent {
                println!("vm: no word for {} s: booting once more …", BOOT.as_secs());
            } else {
                return Ok(());
            }
        }
        match self.run_once(&mut line)? {
            Ended::Done => Ok(()),
            Ended::Silent => bail!("the machine said nothing in {BOOTS} boots of {} s", BOOT.as_secs()),
        }
    }

    fn run_once(&self, line: &mut dyn FnMut(&str)) -> Result<Ended> {
        let mut command = self.command()?;
        command.args(["-serial", "stdio"]);
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("{} cannot be started", self.arch.qemu()))?;
        let log = self.folder.join("console.log");
        let followed = follow(&mut child, &log, line);
        if !matches!(&followed, Ok(Console { ended: true, .. })) {
            // The process may have ended meanwhile.
            let _ = child.kill();
        }
        let status = child.wait().context("waiting for qemu failed")?;
        let console = followed?;
        if console.done {
            return Ok(Ended::Done);
        }
        if console.last.is_empty() && !console.ended {
            return Ok(Ended::Silent);
        }
        let mut said = String::new();
        if let Some(mut errors) = child.stderr.take() {
            // The content is only used for the message.
            let _ = std::io::Read::read_to_string(&mut errors, &mut said);
        }
        bail!(
            "the machine ended ({status}) or fell silent before its job was done; the last it said (all in {}):\n{}\n{said}",
            log.display(),
            console.last.join("\n")
        )
    }
}

/// The number of attempts to boot a machine that prints nothing.
const BOOTS: u32 = 3;
/// The time limit until the first process prints. An idle machine of two processors takes 6 s to
/// emulate it.
const BOOT: Duration = Duration::from_secs(90);
/// The time limit between two lines of a job. The longest test without output takes some minutes.
const SILENCE: Duration = Duration::from_secs(1200);
/// The number of lines of the console in a message.
const LAST: usize = 30;

#[derive(PartialEq, Eq)]
enum Ended {
    Done,
    Silent,
}

/// Passes on lines until the console is closed, or nothing is printed for too long.
fn follow(child: &mut Child, log: &Path, line: &mut dyn FnMut(&str)) -> Result<Console> {
    let mut console = Console { last: Vec::new(), done: false, ended: false };
    let mut log = File::create(log).with_context(|| format!("{} cannot be written", log.display()))?;
    let mut reader = BufReader::new(child.stdout.take().context("qemu has no output")?);
    let (send, lines) = mpsc::channel();
    // The thread stops when the console is closed.
    thread::spawn(move || {
        let mut bytes = Vec::new();
        while reader.read_until(b'\n', &mut bytes).is_ok_and(|length| length > 0) {
            if send.send(std::mem::take(&mut bytes)).is_err() {
                break;
            }
        }
    });
    loop {
        let limit = if console.last.is_empty() { BOOT } else { SILENCE };
        let bytes = match lines.recv_timeout(limit) {
            Ok(bytes) => bytes,
            Err(RecvTimeoutError::Timeout) => return Ok(console),
            Err(RecvTimeoutError::Disconnected) => {
                console.ended = true;
                return Ok(console);
            }
        };
        log.write_all(&bytes).context("writing the console's log failed")?;
        let text = String::from_utf8_lossy(&bytes);
        let text = text.trim_end_matches(['\r', '\n']);
        match text {
            DONE => console.done = true,
            BOOTED => {}
            _ => line(text),
        }
        console.last.push(text.to_owned());
        if console.last.len() > LAST {
            console.last.remove(0);
        }
    }
}

/// The first output of the first process.
const BOOTED: &str = "@@ booted";
/// The last line of a job.
pub(super) const DONE: &str = "@@ the job is done";

struct Console {
    last: Vec<String>,
    /// Whether the job was done.
    done: bool,
    /// Whether qemu has closed the console.
    ended: bool,
}
