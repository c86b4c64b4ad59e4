//! Scripts for the model: manifests in, the desired state out, changes in between.
//!
//! A script is a text file of sections, each introduced by a line `-- command --`:
//!
//! - `-- node NAME --`: sets the node; its lines may be `node-port-addresses IP…` (default: those
//!   of the Node object), `families ipv4 ipv6` (default: both), `loopback ipv4 ipv6` and
//!   `service-cidr CIDR…` (default: none).
//! - `-- write FILE --` and `-- remove FILE --`: change the folder of manifests.
//! - `-- expect --`: the desired state at this point. With `UPDATE_EXPECTED=1` this section is
//!   rewritten.
//! - `-- changes --`: the Service ports that the last `expect` found changed. It is rewritten, too.
//!
//! Text before the first section describes the script.

use std::{env, fmt::Write as _, fs, net::IpAddr, path::Path};

use anyhow::{Context, Result, bail};
use traffic_policy_cluster::{
    model::{Changes, Index, NodeInput, render},
    source::Manifests,
};

#[derive(Debug)]
struct Section {
    command: String,
    body: String,
}

/// Runs one script.
///
/// # Errors
///
/// The script is malformed, or an expectation is not met; both texts are then in the message.
pub fn run(path: &Path) -> Result<()> {
    let text = fs::read_to_string(path)?;
    let (head, mut sections) = split(&text);
    let mut run = Run::new()?;
    let mut unmet = String::new();
    for (i, section) in sections.iter_mut().enumerate() {
        let Some(found) =
            run.section(section).with_context(|| format!("section {}: {}", i + 1, section.command))?
        else {
            continue;
        };
        if found != section.body {
            write!(
                unmet,
                "section {} ({}): expected\n{}found\n{}",
                i + 1,
                section.command,
                indent(&section.body),
                indent(&found)
            )?;
            section.body = found;
        }
    }
    if unmet.is_empty() {
        return Ok(());
    }
    if env::var_os("UPDATE_EXPECTED").is_some() {
        fs::write(path, join(&head, &sections))?;
        return Ok(());
    }
    bail!("{unmet}UPDATE_EXPECTED=1 accepts what was found");
}

struct Run {
    folder: tempfile::TempDir,
    index: Index,
    input: NodeInput,
    node_port_addresses: Option<Vec<IpAddr>>,
    changes: Changes,
}

impl Run {
    fn new() -> Result<Self> {
        Ok(Self {
            folder: tempfile::tempdir()?,
            index: Index::default(),
            input: NodeInput { ipv4: true, ipv6: true, ..NodeInput::default() },
            node_port_addresses: None,
            changes: Changes::default(),
        })
    }

    /// Runs a section. Returns the actual text if the section states an expected one.
    fn section(&mut self, section: &Section) -> Result<Option<String>> {
        let (command, argument) = section.command.split_once(' ').unwrap_or((&section.command, ""));
        match command {
            "node" => self.node(argument, &section.body)?,
            "write" => fs::write(self.folder.path().join(argument), &section.body)?,
            "remove" => fs::remove_file(self.folder.path().join(argument))?,
            "expect" => return self.expect().map(Some),
            "changes" => return Ok(Some(changes(&self.changes))),
            other => bail!("unknown command {other:?}"),
        }
        Ok(None)
    }

    fn node(&mut self, name: &str, body: &str) -> Result<()> {
        name.clone_into(&mut self.input.node_name);
        for line in body.lines().filter(|line| !line.is_empty()) {
            let mut words = line.split_whitespace();
            match words.next() {
                Some("node-port-addresses") => {
                    self.node_port_addresses = Some(words.map(str::parse).collect::<Result<_, _>>()?);
                }
                Some("loopback") => {
                    let families: Vec<_> = words.collect();
                    self.input.loopback_ipv4 = families.contains(&"ipv4");
                    self.input.loopback_ipv6 = families.contains(&"ipv6");
                }
                Some("service-cidr") => {
                    self.input.service_cidrs = words.map(str::parse).collect::<Result<_, _>>()?;
                }
                Some("families") => {
                    let families: Vec<_> = words.collect();
                    self.input.ipv4 = families.contains(&"ipv4");
                    self.input.ipv6 = families.contains(&"ipv6");
                }
                _ => bail!("unknown line {line:?}"),
            }
        }
        Ok(())
    }

    fn expect(&mut self) -> Result<String> {
        let manifests =
            Manifests { folder: self.folder.path().to_owned(), node_name: self.input.node_name.clone() };
        let mut text = String::new();
        match manifests.read() {
            Ok(batch) => {
                batch.apply(&mut self.index);
            }
            Err(mistakes) => {
                for mistake in mistakes.0 {
                    writeln!(text, "mistake: {mistake}")?;
                }
            }
        }
        self.input.node_port_addresses = match &self.node_port_addresses {
            Some(addresses) => addresses.clone(),
            None => self.index.node_addresses(&self.input.node_name).to_vec(),
        };
        self.changes = self.index.update(&self.input);
        text.push_str(&render(self.index.desired()));
        Ok(text)
    }
}

fn changes(changes: &Changes) -> String {
    let mut text = String::new();
    for key in &changes.ports {
        let family = if key.ipv6 { "IPv6" } else { "IPv4" };
        text.push_str(&format!("{} {} {} {family}\n", key.service, key.port, key.protocol));
    }
    let others = [
        (!changes.health.is_empty(), "health"),
        (changes.node_eligible, "node"),
        (changes.service_cidrs, "service CIDRs"),
        (changes.warnings, "warnings"),
    ];
    for (_, name) in others.iter().filter(|(changed, _)| *changed) {
        text.push_str(&format!("{name}\n"));
    }
    text
}

fn split(text: &str) -> (String, Vec<Section>) {
    let mut head = String::new();
    let mut sections: Vec<Section> = Vec::new();
    for line in text.lines() {
        let command = line.strip_prefix("-- ").and_then(|rest| rest.strip_suffix(" --"));
        match (command, sections.last_mut()) {
            (Some(command), _) => sections.push(Section { command: command.to_owned(), body: String::new() }),
            (None, Some(section)) => section.body.extend([line, "\n"]),
            (None, None) => head.extend([line, "\n"]),
        }
    }
    (head, sections)
}

fn join(head: &str, sections: &[Section]) -> String {
    let mut text = head.to_owned();
    for section in sections {
        text.push_str(&format!("-- {} --\n{}", section.command, section.body));
    }
    text
}

fn indent(text: &str) -> String {
    text.lines().map(|line| format!("    {line}\n")).collect()
}
