//! The guides docs/install.md, docs/vagrant.md and docs/kubectl.md: every command in them exists,
//! and every file that they name.

use clap::CommandFactory;
use traffic_policy_agent::command::Arguments;

use crate::{root, text};

/// Programs that users have installed.
const PROGRAMS: [&str; 16] = [
    "cargo",
    "cp",
    "ctr",
    "export",
    "git",
    "install",
    "kind",
    "kubeadm",
    "kubectl",
    "kubectl-traffic_policy",
    "ln",
    "mkdir",
    "podman",
    "source",
    "traffic-policy-agent",
    "vagrant",
];

/// The commands of fenced blocks: the text after a prompt, without a comment.
pub fn commands(page: &str) -> Vec<String> {
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
    let pages = [("docs/install.md", 12), ("docs/vagrant.md", 5), ("docs/kubectl.md", 6)];
    let mut commands = Vec::new();
    for (page, at_least) in pages {
        let found = self::commands(&text(page));
        assert!(found.len() >= at_least, "{page}: {found:?}");
        commands.extend(found);
    }
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
        // The agent is also called within `kubectl exec` and `podman run`.
        if let Some(at) = words.iter().position(|word| word.trim_start_matches('/') == "traffic-policy-agent")
        {
            let name = words[at + 1];
            assert!(agent.find_subcommand(name).is_some(), "{command}: the agent has no {name}");
        }
        for word in
            words.iter().filter(|word| ["crates/", "deploy/"].iter().any(|folder| word.starts_with(folder)))
        {
            assert!(root().join(word).exists(), "{command}: {word} is not there");
        }
    }
    // The script applies deploy/overlays/kind.
    for path in [
        "deploy/kind/up.sh",
        "deploy/overlays/kubeadm",
        "deploy/overlays/registry",
        "deploy/overlays/static-pod",
        "deploy/overlays/cleanup",
        "deploy/vagrant/stories.sh",
    ] {
        assert!(commands.iter().any(|command| command.contains(path)), "no command uses {path}");
    }
}

#[test]
fn commands_are_found_in_a_page() {
    let page = "# a heading\n```console\n$ one two  # why\n# three\noutput\n```\n$ no\n";
    assert_eq!(commands(page), ["one two", "three"]);
}
