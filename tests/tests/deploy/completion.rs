//! Completion in the installed shells: bash offers exactly what the command line accepts.

use std::{
    collections::BTreeSet,
    fs,
    io::Write,
    path::Path,
    process::{Command, Output},
};

use clap::CommandFactory as _;
use traffic_policy_agent::command::Arguments;
use traffic_policy_lb::command as plugin_command;
use traffic_policy_testing::{agent, plugin};

use crate::kubectl::{Installed, out};

/// A script that prints the offers of bash for a command line, as Tab shows them, one word in each
/// line.
const ASK: &str = r#"
source "$1" || exit 3
program=$2
registered=$(complete -p "$program") || exit 4
[[ $registered =~ -F\ ([^ ]+) ]] || exit 5
function=${BASH_REMATCH[1]}
while read -r line; do
    # A line that ends in a space begins a new word.
    COMP_WORDS=($line)
    [[ $line == *"|" ]] && COMP_WORDS[-1]=
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    COMP_LINE="${line%|}" COMP_POINT=${#line} COMPREPLY=()
    $function "$program" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
    echo "${COMPREPLY[*]}"
done
"#;

fn is_installed(shell: &str) -> bool {
    Command::new(shell).args(["-c", "exit 0"]).output().is_ok_and(|output| output.status.success())
}

fn script(program: &Path, shell: &str) -> String {
    out(&Command::new(program).args(["completion", shell]).output().unwrap())
}

/// Each command: the words that lead to it, its flags, and its sub-commands.
fn commands(
    words: &[&str],
    command: &clap::Command,
    found: &mut Vec<(String, BTreeSet<String>, BTreeSet<String>)>,
) {
    let flags = command.get_arguments().filter(|flag| !flag.is_hide_set()).filter_map(|flag| flag.get_long());
    let flags = flags.map(|flag| format!("--{flag}")).collect();
    let inner = || command.get_subcommands().filter(|inner| !inner.is_hide_set());
    let names = inner().map(|inner| inner.get_name().to_owned()).collect();
    found.push((words.join(" "), flags, names));
    for inner in inner().filter(|inner| inner.get_name() != "help") {
        commands(&[words, &[inner.get_name()]].concat(), inner, found);
    }
}

/// The offers of bash for each line; the script exits with a code of its own if bash has no
/// completion for the program.
fn bash(script: &str, program: &str, lines: &[String]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let (ask, file, asked) =
        (folder.path().join("ask"), folder.path().join("script"), folder.path().join("lines"));
    fs::write(&ask, ASK).unwrap();
    fs::write(&file, script).unwrap();
    fs::write(&asked, lines.join("\n") + "\n").unwrap();
    let asked = fs::File::open(asked).unwrap();
    Command::new("bash").args([&ask, &file]).arg(program).stdin(asked).output().unwrap()
}

/// Commands for which the offers of bash differ from their flags or sub-commands.
fn differing(script: &str, program: &str, mut command: clap::Command) -> Vec<String> {
    command.build();
    let mut expected = Vec::new();
    commands(&[program], &command, &mut expected);
    // The bar stands for a word that has not begun yet.
    let lines = expected.iter().flat_map(|(words, ..)| [format!("{words} --"), format!("{words} |")]);
    let offered = out(&bash(script, program, &lines.collect::<Vec<_>>()));
    let offered: Vec<BTreeSet<&str>> =
        offered.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(offered.len(), expected.len() * 2, "{offered:?}");
    let mut differing = Vec::new();
    for ((words, flags, names), offered) in expected.iter().zip(offered.chunks(2)) {
        let of_flags: BTreeSet<_> = flags.iter().map(String::as_str).collect();
        let missing = names.iter().filter(|name| !offered[1].contains(name.as_str()));
        let missing: Vec<_> =
            missing.chain(flags.iter().filter(|flag| !offered[0].contains(flag.as_str()))).collect();
        let unknown: Vec<_> = offered[0].difference(&of_flags).collect();
        if !missing.is_empty() || !unknown.is_empty() {
            differing.push(format!("{words}: not offered {missing:?}, unknown {unknown:?}"));
        }
    }
    differing
}

#[test]
fn bash_offers_each_command_and_flag() {
    if !is_installed("bash") {
        writeln!(std::io::stderr(), "SKIPPED bash_offers_each_command_and_flag: there is no bash").unwrap();
        return;
    }
    let installed = Installed::new();
    let agent = agent::program().unwrap();
    let plugin = installed.folder.path().join("kubectl-traffic_policy");
    for (program, name, command) in [
        (agent.as_path(), "traffic-policy-agent", Arguments::command()),
        (plugin.as_path(), "kubectl-traffic_policy", plugin_command::command()),
    ] {
        assert_eq!(differing(&script(program, "bash"), name, command), Vec::<String>::new(), "{name}");
    }
}

/// Names and values of which the first letters are typed.
#[test]
fn bash_completes_words() {
    if !is_installed("bash") {
        writeln!(std::io::stderr(), "SKIPPED bash_completes_words: there is no bash").unwrap();
        return;
    }
    let script = script(&plugin::program().unwrap(), "bash");
    for (line, wanted) in [
        ("sta", "status"),
        ("lb what", "what-if"),
        ("lb what-if web --po", "--policy --pod"),
        ("lb --output j", "json"),
        ("completion f", "fish"),
        ("lb nothing-like-it", ""),
    ] {
        let output = bash(&script, "kubectl-traffic_policy", &[format!("kubectl-traffic_policy {line}")]);
        let mut found: Vec<_> = out(&output).split_whitespace().map(str::to_owned).collect();
        found.sort_by_key(|word| wanted.find(word.as_str()));
        assert_eq!(found.join(" "), wanted, "{line}");
    }
}

/// Other shells load their script where they are installed.
#[test]
fn other_shells_load_it() {
    let plugin = plugin::program().unwrap();
    let folder = tempfile::tempdir().unwrap();
    for (shell, check) in [("zsh", "-n"), ("fish", "--no-execute")] {
        let script = script(&plugin, shell);
        assert!(
            script.contains("what-if") && script.contains("--spread") || script.contains("-l spread"),
            "{shell}"
        );
        if !is_installed(shell) {
            writeln!(std::io::stderr(), "SKIPPED loading the completion of {shell}: there is no {shell}")
                .unwrap();
            continue;
        }
        let file = folder.path().join(shell);
        fs::write(&file, script).unwrap();
        assert!(Command::new(shell).arg(check).arg(&file).output().unwrap().status.success(), "{shell}");
    }
}
