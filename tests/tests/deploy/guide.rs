//! The guide docs/install.md: every command of it exists, and every file that one names.

use clap::CommandFactory;
use traffic_policy_agent::command::Arguments;

use crate::{root, text};

/// Programs that people bring.
const PROGRAMS: [&str; 9] = ["cp", "ctr", "git", "cd", "kind", "kubeadm", "kubectl", "mkdir", "podman"];

/// Commands of fenced blocks: what follows a prompt, without a comment.
fn commands(page: &str) -> Vec<String> {
    let mut fenced = false;
    let mut found = Vec::new();
    for line in page.lines() {
        if line.starts_with("```") {
            fenced = !fenced;
        }
        let Some(command) = line.strip_prefix("$ ").or_else(|| line.strip_prefix("# ")).filter(|_| fenced)
        else {
            continue;
        };
        let command = command.split("  #").next().unwrap_or_default().trim();
        found.push(command.to_owned());
    }
    found
}

#[test]
fn every_command_exists() {
    let xtask = text("xtask/src/main.rs");
    let agent = Arguments::command();
    let commands = commands(&text("docs/install.md"));
    assert!(commands.len() > 12, "{commands:?}");
    for command in &commands {
        let words: Vec<_> = command.split_whitespace().collect();
        match words[..] {
            ["cargo", "xtask", task, ..] => {
                let variant = format!("    {}{}(", task[..1].to_uppercase(), &task[1..]);
                assert!(xtask.contains(&variant), "{command}: there is no such task");
            }
            [script, ..] if script.starts_with("deploy/") => {}
            [program, ..] => assert!(PROGRAMS.contains(&program), "{command}: {program} is not known"),
            [] => panic!("an empty command"),
        }
        // Also within `kubectl exec` and `podman run`.
        if let Some(at) = words.iter().position(|word| word.trim_start_matches('/') == "traffic-policy-agent")
        {
            let name = words[at + 1];
            assert!(agent.find_subcommand(name).is_some(), "{command}: the agent has no {name}");
        }
        for word in words.iter().filter(|word| word.starts_with("deploy/")) {
            assert!(root().join(word).exists(), "{command}: {word} is not there");
        }
    }
    // deploy/overlays/kind is applied by the script.
    for path in [
        "deploy/kind/up.sh",
        "deploy/overlays/kubeadm",
        "deploy/overlays/static-pod",
        "deploy/overlays/cleanup",
    ] {
        assert!(commands.iter().any(|command| command.contains(path)), "no command uses {path}");
    }
}

#[test]
fn commands_are_found_in_a_page() {
    let page = "# a heading\n```console\n$ one two  # why\n# three\noutput\n```\n$ no\n";
    assert_eq!(commands(page), ["one two", "three"]);
}
