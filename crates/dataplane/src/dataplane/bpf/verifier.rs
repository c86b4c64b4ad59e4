//! The interface to the kernel's verifier: programs are loaded on several threads, and its log is
//! condensed to the reason of a refusal.

use std::{
    env,
    fs::{self, OpenOptions},
    io::{self, Write},
    num::NonZeroUsize,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    thread,
};

use anyhow::{Result, anyhow};
use aya::{
    Btf, Ebpf,
    programs::{Program, ProgramError},
};

use super::{
    attach::Mode,
    error::chain,
    loader::{self, MapSizes},
};
use crate::dataplane::kernel::Kernel;

/// The most threads to use: so few programs do not keep more of them busy.
const MOST_THREADS: usize = 8;

/// The error of programs that the verifier refuses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "Linux {release} refuses {refused} of the packet path's {all} programs; the first is {program}, of which the kernel's verifier says: {reason} ({})",
    kept(log)
)]
pub struct Refusal {
    /// The kernel's release, as it reports it.
    pub release: String,
    /// The name of the first refused program.
    pub program: String,
    /// The verifier's own message.
    pub reason: String,
    /// The file with the whole log, or the reason why there is none.
    pub log: Result<PathBuf, String>,
    pub refused: usize,
    pub all: usize,
}

impl Refusal {
    /// The remedy.
    pub const FIX: &str = concat!(
        "boot a kernel of the table in ",
        env!("CARGO_PKG_REPOSITORY"),
        "/blob/main/docs/compatibility.md, and report this with that log at ",
        env!("CARGO_PKG_REPOSITORY"),
        "/issues"
    );
}

fn kept(log: &Result<PathBuf, String>) -> String {
    match log {
        Ok(path) => format!("its whole log is in {}", path.display()),
        Err(error) => format!("its whole log could not be kept: {error}"),
    }
}

/// The programs that look at one entry, in place of iterators where the kernel refuses those.
const STAND_INS: [&str; 3] = ["tp_gc_flow4", "tp_gc_flow6", "tp_gc_socket"];

/// Verifies and loads every program of the object. Iterators may be refused as [`load_those`] says.
/// Returns the number of programs.
///
/// # Errors
/// A [`Refusal`], or the reason why the kernel loads nothing if that has little to do with the
/// program itself. Of several programs, the first one by name is reported.
pub fn load(object: &mut Ebpf, btf: &Btf) -> Result<usize> {
    let (all, mut failed) = try_to_load(object, btf, |_| true);
    take_refused_iterators(object, &mut failed);
    if failed.is_empty() { Ok(all) } else { Err(explain(&failed, all)) }
}

/// Loads programs like [`load`], but only those whose name is wanted. Where the kernel refuses
/// iterators, as hardened ones do with all programs of tracing, others stand in.
pub fn load_those(object: &mut Ebpf, btf: &Btf, wanted: impl Fn(&str) -> bool) -> Result<usize> {
    let (mut all, mut failed) = try_to_load(object, btf, |name| wanted(name) && !STAND_INS.contains(&name));
    if let Some(error) = take_refused_iterators(object, &mut failed) {
        tracing::info!("the kernel refuses iterators ({error}): sweeps look at each flow by a system call");
        let (more, refused) = try_to_load(object, btf, |name| STAND_INS.contains(&name));
        all += more;
        failed.extend(refused);
    }
    if failed.is_empty() { Ok(all) } else { Err(explain(&failed, all)) }
}

/// Loads programs, on as many threads as there are CPUs: the kernel verifies several programs of a
/// process with CAP_BPF at once (`bpf_check` in kernel/bpf/verifier.c takes its lock for other
/// processes only). Returns the number of programs, and the errors in the order of names.
fn try_to_load(
    object: &mut Ebpf,
    btf: &Btf,
    wanted: impl Fn(&str) -> bool,
) -> (usize, Vec<(String, ProgramError)>) {
    let mut programs: Vec<_> = object.programs_mut().filter(|(name, _)| wanted(name)).collect();
    programs.sort_unstable_by_key(|(name, _)| *name);
    let all = programs.len();
    // The queue starts at the end of the alphabet, with the programs that take longest to verify:
    // xdp_… and tc_….
    let queue = Mutex::new(programs.into_iter().rev());
    let work = || {
        let mut failed = Vec::new();
        loop {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((name, program)) = next else { return failed };
            if let Err(error) = load_one(program, btf) {
                failed.push((name.to_owned(), error));
            }
        }
    };
    let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get).min(MOST_THREADS);
    let mut failed = thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut failed = work();
        for other in others {
            failed.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        failed
    });
    failed.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
    (all, failed)
}

/// Removes iterators that were refused with EPERM while all else was loaded, and returns the first
/// one's error. Who lacks privileges can load nothing.
fn take_refused_iterators(object: &Ebpf, failed: &mut Vec<(String, ProgramError)>) -> Option<String> {
    let is_refused = |(name, error): &(String, ProgramError)| {
        let is_iterator = matches!(object.program(name), Some(Program::Iter(_)));
        let ProgramError::LoadError { io_error, .. } = error else { return None };
        (is_iterator && io_error.raw_os_error() == Some(libc::EPERM)).then(|| io_error.to_string())
    };
    let errors: Option<Vec<String>> = failed.iter().map(is_refused).collect();
    let first = errors?.into_iter().next()?;
    failed.clear();
    Some(first)
}

/// Unloads those programs of packets whose name is wanted and that are loaded.
pub fn unload_those(object: &mut Ebpf, wanted: impl Fn(&str) -> bool) {
    for (_, program) in object.programs_mut().filter(|(name, _)| wanted(name)) {
        // It fails for a program that is not loaded.
        let _ = match program {
            Program::Xdp(program) => program.unload(),
            Program::SchedClassifier(program) => program.unload(),
            _ => Ok(()),
        };
    }
}

fn load_one(program: &mut Program, btf: &Btf) -> Result<(), ProgramError> {
    match program {
        Program::Xdp(program) => program.load(),
        Program::SchedClassifier(program) => program.load(),
        Program::RawTracePoint(program) => program.load(),
        Program::CgroupSockAddr(program) => program.load(),
        Program::CgroupSock(program) => program.load(),
        Program::SockOps(program) => program.load(),
        Program::Iter(program) => program.load("bpf_map_elem", btf),
        _ => Ok(()),
    }
}

/// Loads every program with its own, unpinned maps, attaches nothing, and releases everything.
/// Returns the number of programs.
pub fn try_programs(kernel: &Kernel) -> Result<usize> {
    let sizes = MapSizes { flows4: 64, flows6: 64, unassured: 64, ..MapSizes::default() };
    let (mut object, btf) = loader::open(sizes, None, 0, kernel, Mode::Auto)?;
    load(&mut object, &btf)
}

/// Returns the error for programs that could not be loaded, of which there is at least one.
fn explain(failed: &[(String, ProgramError)], all: usize) -> anyhow::Error {
    let refused: Vec<_> = failed
        .iter()
        .filter_map(|(name, error)| {
            let ProgramError::LoadError { io_error, verifier_log } = error else { return None };
            let log = verifier_log.to_string();
            Some((name, refusal(io_error, &log)?, log))
        })
        .collect();
    if let Some((program, reason, log)) = refused.first() {
        let release = Kernel::found().map_or_else(|_| "of this machine".to_owned(), |(_, release)| release);
        return anyhow!(Refusal {
            release,
            program: (*program).clone(),
            reason: reason.clone(),
            log: keep(&env::temp_dir(), program, log).map_err(|error| error.to_string()),
            refused: refused.len(),
            all,
        });
    }
    let (name, error) = &failed[0];
    match error {
        // The error's own text is the verifier's log, which is empty or irrelevant here.
        ProgramError::LoadError { io_error, .. } => {
            anyhow!("the kernel does not load the program {name}: {io_error}{}", fix(io_error))
        }
        error => anyhow!("the program {name} cannot be loaded: {}", chain(error)),
    }
}

/// Returns the verifier's reason; `None` if the program was not refused for what it does.
fn refusal(error: &io::Error, log: &str) -> Option<String> {
    // A descriptor is only made for a program that the verifier has accepted.
    const OF_THE_CALLER: [i32; 6] =
        [libc::EPERM, libc::ENOMEM, libc::EAGAIN, libc::EINTR, libc::EMFILE, libc::ENFILE];
    let of_the_caller = error.raw_os_error().is_some_and(|number| OF_THE_CALLER.contains(&number));
    if of_the_caller { None } else { reason(log) }
}

fn fix(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM) => {
            ": run as root; if it is root already, look at the container's capabilities, seccomp profile and kernel lockdown"
        }
        Some(libc::ENOMEM) => {
            ": give it more memory; the limit of a container (cgroup) counts what the kernel allocates for it"
        }
        _ => "",
    }
}

/// Writes the verifier's log where its reader finds it: readable by this user alone, and without
/// following a link that another user may have placed there.
fn keep(folder: &Path, program: &str, log: &str) -> io::Result<PathBuf> {
    let path = folder.join(format!("traffic-policy-verifier-{program}.log"));
    let failed = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
    file.and_then(|mut file| file.write_all(log.as_bytes())).map_err(failed)?;
    Ok(path)
}

/// Returns the reason at the end of the verifier's log, after the last instruction and before its
/// statistics, on one line; `None` if there is none.
fn reason(log: &str) -> Option<String> {
    let lines = log.lines().map(str::trim).filter(|line| !line.is_empty());
    let mut said: Vec<&str> = lines.take_while(|line| !is_summary(line)).collect();
    // Linux 7.3 explains the reason after it, with source lines, instructions and a suggestion.
    let report = said.iter().position(|line| line.starts_with(REPORT));
    let title =
        report.and_then(|at| said.drain(at..).next()).map(|line| line.trim_start_matches(REPORT).trim());
    // States may be printed after the reason.
    let is_shown = |line: &&&str| line.starts_with("cur state:") || line.starts_with("old state:");
    let mut last: Vec<&str> =
        said.iter().rev().skip_while(is_shown).take_while(|line| !is_walk(line)).copied().collect();
    if last.is_empty() {
        // Whatever its form, the last line is nearest to the reason.
        last.extend(title.as_ref().or(said.last()));
    }
    last.truncate(MOST_LINES);
    last.reverse();
    (!last.is_empty()).then(|| last.join("; "))
}

/// The start of the report of Linux 7.3 about a refusal.
const REPORT: &str = "Verification failed:";

/// The most lines of a reason: some have two ("invalid access to packet, …", "R2 offset is outside
/// of the packet").
const MOST_LINES: usize = 2;

/// Whether a line belongs to the statistics at the end (`print_verification_stats` in
/// kernel/bpf/verifier.c).
fn is_summary(line: &str) -> bool {
    ["processed ", "verification time ", "stack depth "].iter().any(|start| {
        line.strip_prefix(start).is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
    })
}

/// Whether a line belongs to the walk through the program: instructions, source lines, states of
/// registers, and the path to them.
fn is_walk(line: &str) -> bool {
    const WAY: [&str; 13] = [
        ";",
        "from ",
        "func#",
        "Func#",
        "Global function ",
        "Validating ",
        "caller:",
        "callee:",
        "returning from callee:",
        "to caller at ",
        "frame",
        "last_idx ",
        "mark_precise:",
    ];
    let is_instruction = || {
        let digits = line.bytes().take_while(u8::is_ascii_digit).count();
        digits > 0 && line[digits..].starts_with(':')
    };
    // `R0=1 R1_w=ctx()`
    let is_state = || {
        let first = line.split(' ').next().unwrap_or_default();
        let register = first.split(['=', '_']).next().unwrap_or_default();
        first.contains('=')
            && register.strip_prefix('R').is_some_and(|number| {
                !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit())
            })
    };
    WAY.iter().any(|start| line.starts_with(start)) || is_instruction() || is_state()
}

#[cfg(test)]
mod tests;
