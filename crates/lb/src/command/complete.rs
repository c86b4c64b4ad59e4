//! Completion of `kubectl traffic-policy …`: kubectl calls `kubectl_complete-traffic_policy` with
//! the words typed so far and reads one candidate per line, then a directive.
//! <https://kubernetes.io/docs/tasks/extend-kubectl/kubectl-plugins/#using-kubectl-completions>

use std::{
    ffi::OsString,
    io::{self, Write},
};

use anyhow::Result;
use clap::{Arg, Command};
use traffic_policy_cluster::command::view;

/// cobra's ShellCompDirectiveNoFileComp: file names do not fit.
/// <https://github.com/spf13/cobra/blob/v1.8.0/completions.go#L44-L71>
const NO_FILES: u8 = 4;
/// cobra's ShellCompDirectiveDefault: file names fit, too.
const FILES: u8 = 0;

pub(super) fn print(program: &Command, words: &[OsString]) -> Result<()> {
    let words: Vec<_> = words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let (candidates, directive) = candidates(program, &words);
    view::print(|out| write(out, &candidates, directive))
}

fn write(out: &mut dyn Write, candidates: &[String], directive: u8) -> io::Result<()> {
    for candidate in candidates {
        writeln!(out, "{candidate}")?;
    }
    writeln!(out, ":{directive}")
}

/// Returns words that could replace the last one, which may be empty or incomplete.
fn candidates(program: &Command, words: &[String]) -> (Vec<String>, u8) {
    let Some((begun, before)) = words.split_last() else { return (Vec::new(), NO_FILES) };
    let mut program = program.clone();
    program.build();
    let mut command = &program;
    // The flag whose value comes next.
    let mut open: Option<&Arg> = None;
    for word in before {
        if open.take().is_some() {
            continue;
        }
        match word.strip_prefix("--") {
            Some(flag) => {
                let found = command.get_arguments().find(|argument| argument.get_long() == Some(flag));
                open = found.filter(|argument| argument.get_action().takes_values());
            }
            None => command = command.find_subcommand(word).unwrap_or(command),
        }
    }
    let (all, directive): (Vec<String>, u8) = match open {
        Some(flag) => {
            let values = flag.get_possible_values();
            let directive = if values.is_empty() { FILES } else { NO_FILES };
            (values.iter().map(|value| value.get_name().to_owned()).collect(), directive)
        }
        None if begun.starts_with('-') => {
            let flags = command.get_arguments().filter_map(Arg::get_long);
            (flags.map(|flag| format!("--{flag}")).collect(), NO_FILES)
        }
        None => {
            let positional = command.get_positionals().flat_map(Arg::get_possible_values);
            let values = positional.map(|value| value.get_name().to_owned()).collect::<Vec<_>>();
            let commands = command.get_subcommands().map(|command| command.get_name().to_owned());
            (commands.chain(values).collect(), NO_FILES)
        }
    };
    (all.into_iter().filter(|word| word.starts_with(begun.as_str())).collect(), directive)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::{super::Arguments, *};

    fn after(words: &[&str]) -> (Vec<String>, u8) {
        candidates(&Arguments::command(), &words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn words_that_could_come_next() {
        let (commands, directive) = after(&[""]);
        assert!(["lb", "status", "man"].iter().all(|name| commands.iter().any(|found| found == name)));
        assert_eq!(directive, NO_FILES);
        assert_eq!(after(&["st"]), (vec!["status".to_owned()], NO_FILES));
        assert_eq!(after(&["lb", "what"]), (vec!["what-if".to_owned()], NO_FILES));
        assert_eq!(after(&["lb", "--output", "j"]), (vec!["json".to_owned()], NO_FILES));
        assert_eq!(after(&["lb", "--manifests", ""]), (Vec::new(), FILES));
        let (flags, _) = after(&["lb", "what-if", "web", "--po"]);
        assert_eq!(flags, ["--policy", "--pod"]);
        assert!(after(&["completion", ""]).0.contains(&"bash".to_owned()));
        // The value of a flag is not a command.
        assert_eq!(after(&["lb", "--context", "what-if", "--drai"]).0, Vec::<String>::new());
    }
}
