//! A command line with all of its inputs: flags, then their environment variables, then the file of
//! `--config`, then defaults.

use std::{
    env,
    ffi::{OsStr, OsString},
    path::PathBuf,
};

use anyhow::Result;
use clap::{ArgMatches, CommandFactory as _, FromArgMatches as _, parser::ValueSource};

use super::{
    Arguments,
    config_file::{self, ConfigFile, fields},
};
use crate::in_effect::{InEffect, Setting, Source};

/// Environment variables by their names before a flag was renamed, with the argument that they set:
/// they apply where the present name is not set. The flag itself keeps its old name as an alias.
const RENAMED: [(&str, &str); 2] =
    [("snat_ports", "TRAFFIC_POLICY_POOL_PORTS"), ("idle_unassured", "TRAFFIC_POLICY_IDLE_UNCONFIRMED")];

/// A parsed command line.
#[derive(Debug)]
pub(super) struct Line {
    pub arguments: Arguments,
    /// Content of the file that `--config` names.
    pub file: Option<ConfigFile>,
    /// Settings of the sub-command.
    pub settings: Vec<Setting>,
}

impl Line {
    /// Parses a command line.
    ///
    /// # Errors
    /// A [`clap::Error`], or the file cannot be used.
    pub(super) fn parse(words: &[OsString]) -> Result<Self> {
        let program = with_renamed(Arguments::command(), |name| env::var_os(name).is_some());
        let mut matches = program.clone().try_get_matches_from(words)?;
        let mut file = None;
        if let Some((name, path)) = config(&matches) {
            let mut read = config_file::read(&path)?;
            read.values.retain(|(id, _)| applies(&matches, id));
            matches = with_defaults(program, &name, &read).try_get_matches_from(words)?;
            file = Some(read);
        }
        let settings = settings(&matches, file.as_ref());
        let arguments = Arguments::from_arg_matches(&matches)?;
        Ok(Self { arguments, file, settings })
    }

    /// Returns the flags that the command line itself has.
    pub(super) fn given(&self) -> Vec<String> {
        let given = self.settings.iter().filter(|setting| setting.source == Source::Flag);
        given.map(|setting| setting.flag.clone()).collect()
    }

    pub(super) fn in_effect(&self) -> InEffect {
        InEffect::new(self.file.as_ref().map(|file| file.path.as_path()), self.settings.clone())
    }
}

/// Returns the sub-command and its `--config`.
fn config(matches: &ArgMatches) -> Option<(String, PathBuf)> {
    let (name, matches) = matches.subcommand()?;
    let path = matches.try_get_one::<PathBuf>("config").ok()??;
    Some((name.to_owned(), path.clone()))
}

/// Whether the file's value of a flag applies: its kubeconfig does not where another source was
/// named.
fn applies(matches: &ArgMatches, id: &str) -> bool {
    let Some((_, matches)) = matches.subcommand() else { return true };
    let said = |id: &str| {
        matches.try_contains_id(id).unwrap_or(false)
            && matches.value_source(id).is_some_and(|source| source != ValueSource::DefaultValue)
    };
    id != "kubeconfig" || !(said("manifests") || said("api_server"))
}

fn has(command: &clap::Command, id: &str) -> bool {
    command.get_arguments().any(|argument| argument.get_id() == id)
}

/// The program with the variables of [`RENAMED`] that are set while the present ones are not.
fn with_renamed(program: clap::Command, is_set: impl Fn(&str) -> bool) -> clap::Command {
    RENAMED.into_iter().fold(program, |program, (id, old)| {
        let replaced = |argument: clap::Arg| {
            let now = argument.get_env().and_then(OsStr::to_str).is_some_and(&is_set);
            if is_set(old) && !now { argument.env(old) } else { argument }
        };
        program.mut_subcommands(|command| match has(&command, id) {
            true => command.mut_arg(id, replaced),
            false => command,
        })
    })
}

/// The program with the file's values as defaults.
fn with_defaults(program: clap::Command, subcommand: &str, file: &ConfigFile) -> clap::Command {
    file.values.iter().fold(program, |program, (id, value)| {
        let set = |command: clap::Command| match has(&command, id) {
            true => command.mut_arg(id, |argument| argument.default_value(value.clone())),
            false => command,
        };
        set(program).mut_subcommand(subcommand, set)
    })
}

/// The settings of the sub-command, in the order of its help.
fn settings(matches: &ArgMatches, file: Option<&ConfigFile>) -> Vec<Setting> {
    let Some((name, matches)) = matches.subcommand() else { return Vec::new() };
    let mut program = Arguments::command();
    program.build();
    let Some(command) = program.find_subcommand(name) else { return Vec::new() };
    let arguments = command.get_arguments().filter(|argument| argument.get_long().is_some());
    arguments
        .filter(|argument| !matches!(argument.get_id().as_str(), "help" | "version"))
        .filter_map(|argument| {
            let id = argument.get_id().as_str();
            let values = matches.try_get_raw(id).ok()?;
            let value = values.map(|values| {
                let values: Vec<_> = values.map(|value| value.to_string_lossy()).collect();
                values.join(",")
            });
            let source = match matches.value_source(id) {
                Some(ValueSource::CommandLine) => Source::Flag,
                Some(ValueSource::EnvVariable) => Source::Environment,
                _ if file.is_some_and(|file| file.values.iter().any(|(own, _)| *own == id)) => Source::File,
                _ => Source::Default,
            };
            let flag = format!("--{}", argument.get_long()?);
            Some(Setting { flag, value, source, field: fields::field_of(id) })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::{super::Command, *};

    /// Parses a command line together with a file of these fields.
    fn parse(words: &[&str], fields: &str) -> Result<Line> {
        let mut file = tempfile::NamedTempFile::new()?;
        writeln!(
            file,
            "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n{fields}"
        )?;
        let path = file.path().as_os_str().to_owned();
        let words = ["traffic-policy-agent"].iter().chain(words).map(OsString::from);
        Line::parse(&words.chain(["--config".into(), path]).collect::<Vec<_>>())
    }

    fn value(line: &Line, flag: &str) -> (Option<String>, Source) {
        let setting = line.settings.iter().find(|setting| setting.flag == flag).unwrap();
        (setting.value.clone(), setting.source)
    }

    #[test]
    fn a_flag_comes_before_the_file() {
        let fields = "hostnameOverride: n\nconntrack: {udpTimeout: 45s, udpStreamTimeout: 3m}\nlogging: {verbosity: 4}";
        let line = parse(&["run", "--manifests", "/m", "--idle-udp", "50s"], fields).unwrap();
        assert_eq!(value(&line, "--idle-udp"), (Some("50s".to_owned()), Source::Flag));
        assert_eq!(value(&line, "--idle-udp-answered"), (Some("3m".to_owned()), Source::File));
        assert_eq!(value(&line, "--node-name"), (Some("n".to_owned()), Source::File));
        assert_eq!(value(&line, "--drain"), (Some("30s".to_owned()), Source::Default));
        assert_eq!(value(&line, "--log"), (Some("debug".to_owned()), Source::File));
        assert_eq!(line.arguments.log, "debug");
        let Command::Run(run) = &line.arguments.command else { panic!("not `run`") };
        let idle = run.live().idle;
        assert_eq!((idle.udp.as_secs(), idle.udp_answered.as_secs()), (50, 180));
        let line = parse(&["run", "--log", "warn"], fields).unwrap();
        assert_eq!(line.arguments.log, "warn");
    }

    /// The source of Services is one setting, spread over several flags.
    #[test]
    fn the_files_kubeconfig_holds_where_no_other_source_is_named() {
        let fields = "clientConnection: {kubeconfig: /k}";
        let of = |words: &[&str]| value(&parse(words, fields).unwrap(), "--kubeconfig");
        assert_eq!(of(&["run"]), (Some("/k".to_owned()), Source::File));
        assert_eq!(of(&["run", "--kubeconfig", "/other"]), (Some("/other".to_owned()), Source::Flag));
        for other in [["--manifests", "/m"], ["--api-server", "https://192.0.2.1:6443"]] {
            assert_eq!(of(&[&["run"], &other[..]].concat()), (None, Source::Default), "{other:?}");
        }
    }

    #[test]
    fn a_renamed_flag_is_known_by_its_old_name() {
        for command in ["run", "check"] {
            let line = parse(&[command, "--pool-ports", "1024-20000"], "").unwrap();
            assert_eq!(value(&line, "--snat-ports"), (Some("1024-20000".to_owned()), Source::Flag));
        }
        let line = parse(&["run", "--idle-unconfirmed", "7s"], "").unwrap();
        assert_eq!(value(&line, "--idle-unassured"), (Some("7s".to_owned()), Source::Flag));
    }

    /// The old name is no page's and no help's.
    #[test]
    fn a_renamed_variable_applies_where_the_present_one_is_not_set() {
        let of = |set: &[&str], command: &str, id: &str| {
            let program = with_renamed(Arguments::command(), |name| set.contains(&name));
            let command = program.find_subcommand(command).unwrap().clone();
            let argument = command.get_arguments().find(|argument| argument.get_id() == id).unwrap();
            argument.get_env().unwrap().to_str().unwrap().to_owned()
        };
        for (id, old) in RENAMED {
            let now = of(&[], "run", id);
            assert_ne!(now, old);
            assert_eq!(of(&[old], "run", id), old);
            assert_eq!(of(&[old, &now], "run", id), now);
        }
        assert_eq!(of(&["TRAFFIC_POLICY_POOL_PORTS"], "check", "snat_ports"), "TRAFFIC_POLICY_POOL_PORTS");
    }

    /// `check` has some of the flags of `run`.
    #[test]
    fn check_takes_what_it_knows_from_the_file() {
        let fields = "healthzBindAddress: 192.0.2.1:1\nconntrack: {udpTimeout: 45s}\nclientConnection: {kubeconfig: /k}";
        let line = parse(&["check"], fields).unwrap();
        assert_eq!(value(&line, "--healthz-address"), (Some("192.0.2.1:1".to_owned()), Source::File));
    }
}
