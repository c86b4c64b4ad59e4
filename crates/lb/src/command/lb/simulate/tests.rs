//! The examples of docs/lb.md, compared with what the command prints.

use std::fs;

use clap::Parser;

use super::Arguments;
use crate::tests::manifests;

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    arguments: Arguments,
}

/// Splits a command into words; quotes join them.
fn words(command: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (part, is_quoted) in command.split('\'').zip([false, true].into_iter().cycle()) {
        match is_quoted {
            true => words.push(part.to_owned()),
            false => words.extend(part.split_whitespace().map(str::to_owned)),
        }
    }
    words
}

/// Whether the lines of an example are those of the output; `…` stands for lines that are omitted.
fn is_shown(example: &str, output: &str) -> bool {
    let parts: Vec<Vec<&str>> =
        example.split("\n…\n").map(|part| part.trim_matches('\n').lines().collect()).collect();
    let output: Vec<&str> = output.lines().collect();
    let mut from = 0;
    parts.iter().all(|part| {
        let at = (from..output.len()).find(|at| output[*at..].starts_with(part));
        from = at.map_or(from, |at| at + part.len());
        at.is_some()
    }) && from == output.len()
}

#[test]
fn the_examples_are_what_the_command_prints() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/lb.md");
    let page = fs::read_to_string(page).unwrap();
    let mut seen = 0;
    for example in page.split("```console\n$ kubectl traffic-policy lb simulate ").skip(1) {
        let (command, rest) = example.split_once('\n').unwrap();
        let (example, _) = rest.split_once("```").unwrap();
        let mut words = words(command);
        let at = words.iter().position(|word| word == "--manifests").unwrap() + 1;
        let pods = match words[at].as_str() {
            "shop" => "a@n1 b@n2",
            "three" => "a@n1 b@n2 c@n3",
            other => panic!("no objects for {other}"),
        };
        let folder = tempfile::tempdir().unwrap();
        let yaml = manifests("n1 n2 n3", "LoadBalancer Cluster", pods);
        fs::write(folder.path().join("shop.yaml"), yaml).unwrap();
        words[at] = folder.path().to_str().unwrap().to_owned();
        let command = Command::try_parse_from(["simulate".to_owned()].into_iter().chain(words)).unwrap();
        let mut output = Vec::new();
        command.arguments.simulate(|_, shown| Ok(shown.print(&mut output)?)).unwrap();
        let output = String::from_utf8(output).unwrap();
        assert!(is_shown(example, &output), "docs/lb.md has\n{example}\nand the command prints\n{output}");
        seen += 1;
    }
    assert_eq!(seen, 5);
}
