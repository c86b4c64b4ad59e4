//! `--notice azure`: scheduled events of an Azure virtual machine that end it or move it to another
//! host. They are never approved: that would bring them forward.

use std::time::Duration;

use anyhow::{Context as _, Result};
use jiff::{Timestamp, fmt::rfc2822};
use serde::Deserialize;
use traffic_policy_cluster::source::Leaving;

use super::{
    board::Reporter,
    metadata::Metadata,
    poll::{self, Polled},
};

pub(super) const BASE: &str = "http://169.254.169.254";
const NAME: &str = "/metadata/instance/compute/name?api-version=2021-02-01&format=text";
const PATH: &str = "/metadata/scheduledevents?api-version=2020-07-01";
const HEADERS: [(&str, &str); 1] = [("Metadata", "true")];
/// The interval of requests: the shortest notice is 30 seconds.
const INTERVAL: Duration = Duration::from_secs(5);
/// The time limit of a request. The first one, which turns scheduled events on, may take two
/// minutes.
const LIMIT: Duration = Duration::from_secs(125);
/// The kinds of events after which this machine's connections are gone.
const KINDS: [&str; 3] = ["Preempt", "Terminate", "Redeploy"];

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Document {
    events: Vec<Event>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Event {
    event_type: String,
    /// The names of the machines that it is about.
    #[serde(default)]
    resources: Vec<String>,
    /// The earliest time at which it begins; empty once it has begun.
    #[serde(default)]
    not_before: String,
}

/// Asks forever.
pub(super) async fn run(base: String, reporter: Reporter) {
    poll::run(Azure { server: Metadata::new(&base), name: None }, reporter).await;
}

struct Azure {
    server: Metadata,
    /// The name of this machine, once it is known.
    name: Option<String>,
}

impl Polled for Azure {
    const INTERVAL: Duration = INTERVAL;

    async fn request(&mut self) -> Result<Option<Leaving>> {
        ask(&self.server, &mut self.name).await
    }
}

async fn ask(server: &Metadata, name: &mut Option<String>) -> Result<Option<Leaving>> {
    // The document is about all machines of a set: this one's name tells which events are its own.
    let own = match name {
        Some(own) => own,
        None => {
            let answer = server.get(NAME, &HEADERS, super::metadata::LIMIT).await?.ok(NAME)?;
            name.insert(answer.body.trim().to_owned())
        }
    };
    let answer = server.get(PATH, &HEADERS, LIMIT).await?.ok(PATH)?;
    let document: Document = serde_json::from_str(&answer.body).context(PATH)?;
    Ok(document.leaving(own))
}

impl Document {
    /// Returns the first event that ends this machine.
    fn leaving(&self, own: &str) -> Option<Leaving> {
        let is_own = |event: &&Event| {
            KINDS.contains(&event.event_type.as_str())
                && event.resources.iter().any(|resource| resource.eq_ignore_ascii_case(own))
        };
        let begins = |event: &&Event| begin(&event.not_before);
        let first = self.events.iter().filter(is_own).min_by_key(begins)?;
        Some(Leaving {
            reason: format!("scheduled event {}", first.event_type),
            gone_by: begin(&first.not_before),
        })
    }
}

fn begin(not_before: &str) -> Option<Timestamp> {
    let zoned = rfc2822::DateTimeParser::new().parse_zoned(not_before).ok()?;
    Some(zoned.timestamp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_events_that_end_this_machine() {
        let event = |kind: &str, machine: &str, not_before: &str| {
            format!(
                r#"{{"EventId": "1", "EventType": "{kind}", "ResourceType": "VirtualMachine",
                "Resources": ["{machine}"], "EventStatus": "Scheduled", "NotBefore": "{not_before}"}}"#
            )
        };
        let said = |events: &[String]| {
            let text = format!(r#"{{"DocumentIncarnation": 2, "Events": [{}]}}"#, events.join(", "));
            let document: Document = serde_json::from_str(&text).unwrap();
            document
                .leaving("pool_3")
                .map(|leaving| (leaving.reason, leaving.gone_by.map(|time| time.to_string())))
        };
        let time = "Mon, 19 Sep 2016 18:29:47 GMT";
        assert_eq!(said(&[]), None);
        assert_eq!(said(&[event("Freeze", "pool_3", time)]), None, "it comes back as it was");
        assert_eq!(said(&[event("Preempt", "pool_2", time)]), None, "another machine of the set");
        let own = ("scheduled event Preempt".to_owned(), Some("2016-09-19T18:29:47Z".to_owned()));
        assert_eq!(said(&[event("Preempt", "POOL_3", time)]), Some(own));
        let begun = event("Redeploy", "pool_3", "");
        let expected = ("scheduled event Redeploy".to_owned(), None);
        assert_eq!(said(&[event("Terminate", "pool_3", time), begun]), Some(expected), "one that has begun");
    }
}
