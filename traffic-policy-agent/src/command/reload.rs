//! SIGHUP, and a change of the file of `--config`: settings that can change at run time are
//! applied, and the rest is named.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use anyhow::{Context as _, Result};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
    task::spawn_blocking,
    time::{MissedTickBehavior, interval},
};
use traffic_policy_cluster::command::logging::LogLevel;

use super::{
    Command,
    config_file::{self, ConfigFile, Note},
    line::Line,
};
use crate::{
    controller::{Live, Reload, Reloads},
    in_effect::{InEffect, Setting},
    systemd::Notifier,
};

/// Interval of checking the file. A change is read when two checks have found the same content, as
/// the writer may not have finished.
const LOOK: Duration = Duration::from_secs(2);

/// Reads the file of the command line again.
#[derive(Debug)]
pub(super) struct Reloader {
    words: Vec<OsString>,
    in_effect: InEffect,
    path: Option<PathBuf>,
    /// Text of the file that was read last; its notes are logged once.
    read: String,
    notes: Vec<Note>,
    /// Text of the file at the last check.
    seen: Option<String>,
    level: LogLevel,
}

impl Reloader {
    pub(super) fn new(
        words: Vec<OsString>,
        in_effect: InEffect,
        file: Option<ConfigFile>,
        level: LogLevel,
    ) -> Self {
        let path = file.as_ref().map(|file| file.path.clone());
        let ConfigFile { text: read, notes, .. } = file.unwrap_or_default();
        Self { words, in_effect, path, read, notes, seen: None, level }
    }

    /// Follows the signal and the file from now on, as long as the runtime lives.
    pub(super) fn follow(self, notifier: Notifier) -> Result<Reloads> {
        let hangup = signal(SignalKind::hangup()).context("SIGHUP cannot be waited for")?;
        let (sender, reloads) = Reloads::channel();
        tokio::spawn(self.run(hangup, sender, notifier));
        Ok(reloads)
    }

    async fn run(mut self, mut hangup: Signal, sender: mpsc::Sender<Reload>, notifier: Notifier) {
        let mut looks = interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = hangup.recv() => {
                    notifier.reloading();
                    self.reload("SIGHUP", &sender).await;
                    notifier.reloaded();
                }
                _ = looks.tick(), if self.path.is_some() => {
                    if self.has_changed().await {
                        self.reload("the file has changed", &sender).await;
                    }
                }
            }
        }
    }

    /// Whether the file differs from the text that was read, and was the same at the last check. A
    /// file that cannot be read counts as unchanged.
    async fn has_changed(&mut self) -> bool {
        let Some(path) = self.path.clone() else { return false };
        let Ok(Ok(now)) = spawn_blocking(move || config_file::text(&path)).await else { return false };
        let changed = now != self.read && self.seen.as_ref() == Some(&now);
        self.seen = Some(now);
        changed
    }

    async fn reload(&mut self, why: &str, sender: &mpsc::Sender<Reload>) {
        if self.path.is_none() {
            tracing::info!("{why}: without --config nothing can have changed");
            return;
        }
        let line = match Line::parse(&self.words) {
            Ok(line) => line,
            Err(error) => {
                // The change is logged once.
                self.read = self.seen.clone().unwrap_or_default();
                tracing::error!("{why}: what was in effect stays so: {error:#}");
                return;
            }
        };
        let ConfigFile { text, notes, .. } = line.file.unwrap_or_default();
        self.read = text;
        for note in notes.iter().filter(|note| !self.notes.contains(note)) {
            tracing::warn!("--config: {note}");
        }
        self.notes = notes;
        let Command::Run(arguments) = &line.arguments.command else { return };
        self.apply(why, &line.settings, &line.arguments.log, arguments.live(), sender).await;
    }

    async fn apply(
        &self,
        why: &str,
        settings: &[Setting],
        level: &str,
        live: Live,
        sender: &mpsc::Sender<Reload>,
    ) {
        let (now, later): (Vec<_>, Vec<_>) =
            self.in_effect.differences(settings).into_iter().partition(is_live);
        let (reload, done) = Reload::new(live);
        if sender.send(reload).await.is_err() || done.await.is_err() {
            // The run loop has ended.
            return;
        }
        let shown =
            |settings: &[Setting]| settings.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let (applied, postponed) = (shown(&now), shown(&later));
        let other_level = now.iter().any(|setting| setting.flag == "--log");
        self.in_effect.wait(later);
        now.into_iter().for_each(|setting| self.in_effect.apply(setting));
        if !postponed.is_empty() {
            tracing::warn!("{why}: only a restart applies {postponed}");
        }
        if applied.is_empty() {
            tracing::info!("{why}: nothing to apply");
        } else {
            tracing::info!("{why}: applied {applied}");
        }
        // The level is applied last: at another level, the log might lack what was applied.
        if other_level {
            match self.level.set(level) {
                Ok(()) => tracing::debug!("logging in this detail from now on: {level}"),
                Err(error) => tracing::error!("{error:#}"),
            }
        }
    }
}

/// Whether a setting is applied without a restart.
fn is_live(setting: &Setting) -> bool {
    ["--log", "--node-port-addresses"].contains(&setting.flag.as_str()) || setting.flag.starts_with("--idle-")
}
