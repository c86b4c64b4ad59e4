//! Level and format of the log, and the change of the level at run time.

use std::io::{self, IsTerminal};

use anyhow::{Context as _, Result};
use tracing_subscriber::{
    EnvFilter, Layer as _, Registry, fmt, layer::SubscriberExt as _, reload, util::SubscriberInitExt as _,
};

/// The values of `--log-format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// Human-readable lines.
    Text,
    /// One JSON object per line.
    Json,
}

/// The level in effect.
#[derive(Clone, Debug)]
pub struct LogLevel(reload::Handle<EnvFilter, Registry>);

impl LogLevel {
    /// Sets another level.
    pub fn set(&self, level: &str) -> Result<()> {
        self.0.reload(EnvFilter::try_new(level)?).context("the log level cannot be changed")
    }
}

/// Starts logging to standard error.
pub fn start(level: &str, format: LogFormat) -> Result<LogLevel> {
    let (filter, handle) = reload::Layer::new(EnvFilter::try_new(level)?);
    let lines = fmt::layer().with_writer(io::stderr).with_target(false);
    let lines = match format {
        // Colours are for people; a file or a log collector would keep their codes.
        LogFormat::Text => lines.with_ansi(io::stderr().is_terminal()).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    tracing_subscriber::registry()
        .with(filter)
        .with(lines)
        .try_init()
        .context("logging has begun already")?;
    Ok(LogLevel(handle))
}
