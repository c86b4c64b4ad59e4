//! docs/cli.md: every sub-command with its arguments, flags, environment variables and defaults.

use clap::{Arg, Command, CommandFactory};
use traffic_policy_agent::command::{
    Arguments,
    config_file::fields::{FIELDS, Meaning},
};

use crate::page;

const PAGE: &str = "docs/cli.md";

#[test]
fn the_page_lists_every_command_and_flag() {
    let command = command();
    let (global, _): (Vec<_>, Vec<_>) = arguments(&command).into_iter().partition(|arg| arg.is_global_set());
    assert!(!global.is_empty());
    page::compare(PAGE, "all commands", &table(&global));
    page::compare(PAGE, "commands", &commands(&command, |_| true));
    // `completion` and `man` are documented with the agent.
    let own = commands(&plugin(), |name| name.split(' ').next() == Some("lb"));
    page::compare(PAGE, "commands of the plugin", &own);
}

/// docs/kubectl.md: `status` of the plugin.
#[test]
fn the_page_lists_the_plugin_s_own_flags() {
    let plugin = plugin();
    let status = plugin.find_subcommand("status").unwrap();
    let own: Vec<_> = arguments(status).into_iter().filter(|arg| !arg.is_global_set()).collect();
    let (positional, flags): (Vec<_>, Vec<_>) = own.into_iter().partition(|arg| arg.is_positional());
    page::compare(
        "docs/kubectl.md",
        "flags of status",
        &format!("{}\n{}", table(&positional), table(&flags)),
    );
}

/// docs/configuration.md: every field of KubeProxyConfiguration.
#[test]
fn the_page_lists_every_field() {
    let command = command();
    let run = command.find_subcommand("run").unwrap();
    let (mut applied, mut ignored) = (Vec::new(), Vec::new());
    for field in FIELDS {
        match field.meaning {
            Meaning::Flag(id, _) => {
                let flag = run.get_arguments().find(|arg| arg.get_id() == id).unwrap().get_long().unwrap();
                applied.push(vec![format!("`{}`", field.path), format!("`--{flag}`")]);
            }
            Meaning::Ignored { why, .. } => ignored.push(vec![format!("`{}`", field.path), page::cell(why)]),
        }
    }
    let page = "docs/configuration.md";
    page::compare(page, "fields that set a flag", &page::table(&["Field", "Flag"], &applied));
    page::compare(page, "fields without effect", &page::table(&["Field", "Instead"], &ignored));
}

/// The whole command line of the agent, as users see it.
pub fn command() -> Command {
    let mut command = Arguments::command();
    command.build();
    command
}

/// The command line of the kubectl plugin.
pub fn plugin() -> Command {
    let mut command = traffic_policy_lb::command::command();
    command.build();
    command
}

pub fn subcommands(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|command| command.get_name() != "help")
}

/// The arguments except `--help` and `--version`.
pub fn arguments(command: &Command) -> Vec<&Arg> {
    command.get_arguments().filter(|arg| !matches!(arg.get_id().as_str(), "help" | "version")).collect()
}

/// All sub-commands, recursively, by the words that users type.
pub fn named<'c>(prefix: &str, command: &'c Command) -> Vec<(String, &'c Command)> {
    let own = subcommands(command).flat_map(|command| {
        let name = format!("{prefix}{}", command.get_name());
        let inner = named(&format!("{name} "), command);
        std::iter::once((name, command)).chain(inner)
    });
    own.collect()
}

fn commands(command: &Command, is_shown: impl Fn(&str) -> bool) -> String {
    let mut text = String::new();
    for (name, command) in named("", command).into_iter().filter(|(name, _)| is_shown(name)) {
        text.push_str(&format!("### {name}\n\n"));
        let about = command.get_long_about().or(command.get_about()).unwrap().to_string();
        let about: Vec<_> = about.split("\n\n").map(page::cell).collect();
        text.push_str(&format!("{}\n\n", about.join("\n\n")));
        let own: Vec<_> = arguments(command).into_iter().filter(|arg| !arg.is_global_set()).collect();
        let (positional, flags): (Vec<_>, Vec<_>) = own.into_iter().partition(|arg| arg.is_positional());
        let mut headings = vec![None];
        for flag in &flags {
            if !headings.contains(&flag.get_help_heading()) {
                headings.push(flag.get_help_heading());
            }
        }
        if !positional.is_empty() {
            text.push_str(&format!("{}\n", table(&positional)));
        }
        for heading in headings {
            let under: Vec<_> =
                flags.iter().copied().filter(|flag| flag.get_help_heading() == heading).collect();
            if under.is_empty() {
                continue;
            }
            if let Some(heading) = heading {
                text.push_str(&format!("{heading}:\n\n"));
            }
            text.push_str(&format!("{}\n", table(&under)));
        }
    }
    text
}

fn table(arguments: &[&Arg]) -> String {
    let rows: Vec<_> = arguments
        .iter()
        .map(|arg| {
            let help = arg.get_long_help().or(arg.get_help()).unwrap().to_string();
            let mut help = page::cell(&help);
            // clap omits the last full stop.
            if !help.ends_with('.') {
                help.push('.');
            }
            let possible: Vec<_> =
                arg.get_possible_values().iter().map(|value| format!("`{}`", value.get_name())).collect();
            if !possible.is_empty() && arg.get_action().takes_values() {
                help.push_str(&format!(" One of {}.", possible.join(", ")));
            }
            let defaults: Vec<_> = arg
                .get_default_values()
                .iter()
                .filter(|value| !value.is_empty())
                .map(|value| code(value.to_str().unwrap()))
                .collect();
            let environment = arg.get_env().map_or_else(String::new, |name| code(name.to_str().unwrap()));
            vec![code(&name(arg)), defaults.join(", "), environment, help]
        })
        .collect();
    let first = if arguments.iter().all(|arg| arg.is_positional()) { "Argument" } else { "Flag" };
    page::table(&[first, "Default", "Environment", "What it says"], &rows)
}

fn name(arg: &Arg) -> String {
    let values: Vec<_> = arg.get_value_names().unwrap_or_default().iter().map(ToString::to_string).collect();
    match arg.get_long() {
        Some(long) if arg.get_action().takes_values() => format!("--{long} {}", values.join(" ")),
        Some(long) => format!("--{long}"),
        None => values.join(" "),
    }
}

/// A code span within a table.
fn code(text: &str) -> String {
    format!("`{}`", text.replace('|', "\\|"))
}
