//! The kernel's counters in every namespace: those that changed since a test began show where its
//! packets stayed.

use std::collections::BTreeMap;
use std::process::Command;

use serde_json::Value;

use crate::agent::Agent;
use crate::netns::Namespace;

/// Counters by namespace, source and name.
#[derive(Debug, Default)]
pub struct State(BTreeMap<String, i128>);

impl State {
    /// Reads the counters of these namespaces, under the given names, and of the agent. Counters
    /// that cannot be read are left out: they are for the message of a test that has failed
    /// already.
    pub fn read(namespaces: &[(&str, &Namespace)], agent: &Agent) -> Self {
        let mut state = Self::default();
        for (name, namespace) in namespaces {
            state.links(name, namespace);
            // Lines of headings and of numbers alternate; the file for IPv6 has a name and a number
            // in each line.
            for file in ["snmp", "netstat"] {
                let path = format!("/proc/net/{file}");
                let text = text(namespace, "cat", &[&path]);
                let mut lines = text.lines();
                while let (Some(names), Some(values)) = (lines.next(), lines.next()) {
                    let (mut names, values) = (names.split_whitespace(), values.split_whitespace());
                    let group = names.next().unwrap_or_default();
                    names.zip(values.skip(1)).for_each(|(counter, value)| {
                        state.note(format!("{name} {group}{counter}"), value);
                    });
                }
            }
            for line in text(namespace, "cat", &["/proc/net/snmp6"]).lines() {
                if let Some((counter, value)) = line.split_once(char::is_whitespace) {
                    state.note(format!("{name} {counter}"), value);
                }
            }
        }
        if let Ok(status) = agent.json(&["status"]) {
            for row in status["counters"].as_array().into_iter().flatten() {
                let of = |key: &str| row[key].as_str().unwrap_or_default().to_owned();
                let counter = format!("agent {} {}", of("hook"), of("outcome"));
                state.note(counter, &row["packets"].to_string());
            }
        }
        state
    }

    /// Adds the counters of every device: those of the stack, its MTU, and those of the driver.
    fn links(&mut self, name: &str, namespace: &Namespace) {
        let links = text(namespace, "ip", &["-s", "-s", "-j", "link", "show"]);
        let links: Vec<Value> = serde_json::from_str(&links).unwrap_or_default();
        for link in links {
            let Some(device) = link["ifname"].as_str() else { continue };
            self.note(format!("{name} {device} mtu"), &link["mtu"].to_string());
            for way in ["rx", "tx"] {
                for (counter, value) in link["stats64"][way].as_object().into_iter().flatten() {
                    self.note(format!("{name} {device} {way}.{counter}"), &value.to_string());
                }
            }
            for line in text(namespace, "ethtool", &["-S", device]).lines() {
                if let Some((counter, value)) = line.rsplit_once(':') {
                    self.note(format!("{name} {device} driver.{}", counter.trim()), value);
                }
            }
        }
    }

    fn note(&mut self, counter: String, value: &str) {
        if let Ok(value) = value.trim().parse() {
            self.0.insert(counter, value);
        }
    }

    /// Returns a line for each counter that differs.
    pub fn until(&self, now: &Self) -> String {
        let changed = now.0.iter().filter_map(|(counter, value)| {
            let change = value - self.0.get(counter).copied().unwrap_or(0);
            (change != 0).then(|| format!("{counter} {change:+}\n"))
        });
        changed.collect()
    }
}

fn text(namespace: &Namespace, program: &str, arguments: &[&str]) -> String {
    let mut command = Command::new(program);
    command.args(arguments);
    let output = namespace.output(command).map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&output).into_owned()
}

#[cfg(test)]
#[test]
fn only_changes_are_told() {
    let state = |values: &[(&str, &str)]| {
        let mut state = State::default();
        values.iter().for_each(|(counter, value)| state.note((*counter).to_owned(), value));
        state
    };
    let (before, now) =
        (state(&[("a", "7"), ("b", "1")]), state(&[("a", "5"), ("b", " 1"), ("c", "2"), ("d", "many")]));
    assert_eq!(before.until(&now), "a -2\nc +2\n");
}
