//! `bugtool`: collects what a fault report needs in one tar.

mod secrets;

use std::{
    env,
    fs::{File, OpenOptions},
    io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use serde::Serialize;
use traffic_policy_dataplane::{DEFAULT_PINS, node::Network};

use super::{agent_request, metrics_address::MetricsAddress, view};

/// Collect the contents of a fault report in one tar, whether an agent runs or not. Changes
/// nothing.
///
/// It holds the output of `status`, `services`, `flows` and `check`, /metrics and /configz,
/// devices, addresses, routes, rules and neighbours, and the last lines of a log. It contains
/// addresses of clients and Services; tokens, keys and the content of kubeconfigs are left out.
/// For a part that could not be read, the tar has the reason.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Name of the tar: a file that does not exist yet, or `-` for standard output. Default:
    /// traffic-policy-bugtool-SECONDS.tar in this folder.
    #[arg(long, env = "TRAFFIC_POLICY_OUT", value_name = "FILE|-")]
    out: Option<PathBuf>,
    /// The folder that `run` was given.
    #[arg(long, env = "TRAFFIC_POLICY_PIN_DIR", default_value = DEFAULT_PINS, value_name = "D")]
    pin_dir: PathBuf,
    /// The agent's address of /metrics and /configz; `none`: not served.
    #[arg(
        long,
        env = "TRAFFIC_POLICY_METRICS_ADDRESS",
        default_value = "127.0.0.1:10249",
        value_name = "A|none"
    )]
    metrics_address: MetricsAddress,
    /// A file with the agent's log: its last 2,000 lines are taken.
    #[arg(long, env = "TRAFFIC_POLICY_LOG_FILE", value_name = "F")]
    log_file: Option<PathBuf>,
    /// Maximum number of flows, as a sample.
    #[arg(long, env = "TRAFFIC_POLICY_SAMPLE_FLOWS", default_value_t = 1000, value_name = "N")]
    sample_flows: usize,
}

/// Time limit of each command: `check` loads all programs.
const PATIENCE: Duration = Duration::from_secs(120);
/// Time limit of a scrape.
const SCRAPE: Duration = Duration::from_secs(20);
/// Number of lines kept of a log; [`BYTES`] is the number of bytes that are searched for them.
const LINES: usize = 2_000;
const BYTES: u64 = 4 << 20;

/// A file of the tar.
struct Part {
    name: String,
    content: Vec<u8>,
    /// The reason why the content is not what the name promises.
    error: Option<String>,
}

/// Content of `summary.json`.
#[derive(Serialize)]
struct Summary<'a> {
    version: &'static str,
    seconds: u64,
    kernel: String,
    parts: Vec<Line<'a>>,
}

#[derive(Serialize)]
struct Line<'a> {
    name: &'a str,
    bytes: usize,
    error: Option<&'a str>,
}

impl Arguments {
    pub(super) fn execute(self) -> Result<()> {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let name = self.out.clone().unwrap_or_else(|| format!("traffic-policy-bugtool-{seconds}.tar").into());
        // The file is created first, before minutes are spent on content that cannot be stored.
        let file = if name.as_os_str() == "-" { None } else { Some(create(&name)?) };
        let parts = self.collect();
        let wrong = parts.iter().filter(|part| part.error.is_some()).count();
        let total = parts.len();
        match file {
            None => drop(write(io::stdout().lock(), &parts, seconds)?),
            Some(file) => {
                write(file, &parts, seconds)?.sync_all().context("writing the tar failed")?;
                view::print(|out| {
                    writeln!(out, "{}: {total} parts, {wrong} of them say why they are empty", name.display())
                })?;
            }
        }
        Ok(())
    }

    fn collect(&self) -> Vec<Part> {
        let pins = self.pin_dir.display().to_string();
        let flows = self.sample_flows.to_string();
        let json = ["--output", "json", "--pin-dir", &pins];
        let mut parts = Vec::new();
        for (name, words) in [
            ("status.json", &["status"][..]),
            ("services.json", &["services"]),
            ("flows.json", &["flows", "--limit", &flows]),
            ("check.json", &["check"]),
        ] {
            parts.push(part(name, command(&[words, &json].concat())));
        }
        for (name, path) in [("metrics.txt", "/metrics"), ("configz.json", "/configz")] {
            let content = match self.metrics_address.0 {
                Some(address) => agent_request::get(address, path, SCRAPE).map(|body| body.to_vec()),
                None => Err(anyhow::anyhow!("--metrics-address is none")),
            };
            parts.push(part(name, content));
        }
        match network() {
            Ok(lists) => parts.extend(
                lists
                    .into_iter()
                    .map(|(name, list)| part(&format!("network/{name}.txt"), list.map(String::into_bytes))),
            ),
            Err(error) => parts.push(part("network/links.txt", Err(error))),
        }
        if let Some(file) = &self.log_file {
            let lines = last_lines(file).with_context(|| format!("{} cannot be read", file.display()));
            parts.push(part("log.txt", lines.map(String::into_bytes)));
        }
        parts
    }
}

/// Creates the file readable for its owner only: it shows which addresses communicate.
fn create(path: &Path) -> Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).with_context(|| {
        format!("{} cannot be made: name a file that is not there yet with --out, or -", path.display())
    })
}

fn part(name: &str, content: Result<Vec<u8>>) -> Part {
    let name = name.to_owned();
    match content {
        Ok(content) => Part { name, content: secrets::redacted(&content), error: None },
        Err(error) => {
            let error = format!("{error:#}");
            let content = secrets::redacted(format!("not available: {error}\n").as_bytes());
            Part {
                name,
                content,
                error: Some(String::from_utf8_lossy(&secrets::redacted(error.as_bytes())).into()),
            }
        }
    }
}

/// Returns the output of another command of this program. The command may fail and still have
/// printed something, as `check` does.
fn command(words: &[&str]) -> Result<Vec<u8>> {
    let program = env::current_exe().context("this program's own path is unknown")?;
    let mut child = Command::new(program)
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("`{}` cannot be started", words.join(" ")))?;
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let reader = |pipe: Option<Box<dyn io::Read + Send>>| {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            // Partial output is better than none.
            let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
            bytes
        })
    };
    let out = reader(out.map(|pipe| Box::new(pipe) as _));
    let err = reader(err.map(|pipe| Box::new(pipe) as _));
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if start.elapsed() > PATIENCE {
            child.kill()?;
            child.wait()?;
            bail!("`{}` does not end within {} s", words.join(" "), PATIENCE.as_secs());
        }
        // The standard library has no wait with a time limit.
        thread::sleep(Duration::from_millis(20));
    };
    let (out, err) = (out.join().unwrap_or_default(), err.join().unwrap_or_default());
    if !status.success() && out.is_empty() {
        bail!("{}", String::from_utf8_lossy(&err).trim());
    }
    Ok(out)
}

fn network() -> Result<Vec<(&'static str, Result<String>)>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (network, _events) = Network::connect()?;
        Ok(network.dump().await)
    })
}

/// Returns the last lines of a file.
fn last_lines(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let skipped = file.metadata()?.len().saturating_sub(BYTES);
    file.seek(SeekFrom::Start(skipped))?;
    let mut lines = std::collections::VecDeque::new();
    for (number, line) in BufReader::new(file.take(BYTES)).split(b'\n').enumerate() {
        let line = line?;
        // The first line may have lost its beginning.
        if number > 0 || skipped == 0 {
            lines.push_back(String::from_utf8_lossy(&line).into_owned() + "\n");
        }
        if lines.len() > LINES {
            lines.pop_front();
        }
    }
    Ok(lines.into_iter().collect())
}

/// Writes the tar, with the summary first.
fn write<W: io::Write>(out: W, parts: &[Part], seconds: u64) -> Result<W> {
    let lines = parts.iter().map(|part| Line {
        name: &part.name,
        bytes: part.content.len(),
        error: part.error.as_deref(),
    });
    let summary = Summary {
        version: env!("CARGO_PKG_VERSION"),
        seconds,
        kernel: std::fs::read_to_string("/proc/version").unwrap_or_default().trim().to_owned(),
        parts: lines.collect(),
    };
    let summary = serde_json::to_vec_pretty(&summary)?;
    let mut tar = tar::Builder::new(out);
    let mut append = |name: &str, content: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(seconds);
        tar.append_data(&mut header, format!("traffic-policy-bugtool/{name}"), content)
    };
    append("summary.json", &summary).context("writing the tar failed")?;
    for part in parts {
        append(&part.name, &part.content).context("writing the tar failed")?;
    }
    let mut out = tar.into_inner().context("writing the tar failed")?;
    out.flush().context("writing the tar failed")?;
    Ok(out)
}
