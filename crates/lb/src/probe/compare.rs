//! The comparison of one answer with the one that follows from the objects.

use super::{Asking, Cause, Heard, Http, Spoken};
use crate::{Answer, Level, Question};

/// An answer that does not follow from the objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    pub cause: Cause,
    pub level: Level,
}

/// Further facts about a node, from all of its answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Contact {
    /// Whether `/healthz` was refused.
    pub(super) proxy_refused: bool,
    /// Whether anything answered over HTTP.
    pub(super) http: bool,
    /// Whether `/healthz` says that the node is cut off.
    pub(super) cut_off: bool,
}

impl Contact {
    pub(super) fn add(&mut self, asking: &Asking, heard: &Heard) {
        self.proxy_refused |= asking.question == Question::ProxyHealth && *heard == Heard::Refused;
        self.http |= matches!(heard, Heard::Http(_));
        self.cut_off |=
            matches!(heard, Heard::Http(Http { spoken: Spoken::Proxy { cut_off: true, .. }, .. }));
    }
}

const fn found(cause: Cause, level: Level) -> Option<Difference> {
    Some(Difference { cause, level })
}

/// Compares an answer. `None`: it follows from the objects.
pub(super) fn compare(asking: &Asking, heard: &Heard, contact: Contact) -> Option<Difference> {
    match heard {
        Heard::NoAddress => return found(Cause::NoAddress, Level::Warning),
        Heard::NotAsked(_) => return found(Cause::NotAsked, Level::Warning),
        _ => {}
    }
    if asking.kubelet_silent {
        return if heard.is_contact() { found(Cause::KubeletOnly, Level::Note) } else { None };
    }
    match asking.question {
        Question::TrafficPort(_) => traffic(asking.expected, heard, contact),
        Question::ProxyHealth | Question::ServiceHealth(_) => health(asking, heard, contact),
        Question::Nothing => None,
    }
}

/// Compares the answer of a health port.
fn health(asking: &Asking, heard: &Heard, contact: Contact) -> Option<Difference> {
    // A balancer believes something other than what these objects imply.
    let missed = if asking.expected.is_healthy() { Level::Error } else { Level::Warning };
    match heard {
        Heard::Http(http) => match asking.question {
            Question::ProxyHealth => proxy(asking, http),
            _ => service(asking, http, contact),
        },
        Heard::Silence => found(Cause::Firewall, missed),
        Heard::Unreachable => found(Cause::WrongAddress, missed),
        Heard::Hangs => found(Cause::Hangs, missed),
        Heard::Refused if asking.question == Question::ProxyHealth => {
            // Another port of the proxy answers: its /healthz is elsewhere.
            if contact.http && !asking.decides {
                found(Cause::NothingListens, Level::Warning)
            } else if contact.http {
                found(Cause::NothingListens, missed)
            } else {
                found(Cause::DeadAgent, Level::Error)
            }
        }
        Heard::Refused if contact.proxy_refused => found(Cause::DeadAgent, Level::Error),
        Heard::Refused => found(Cause::NothingListens, missed),
        // A connection alone is not an answer.
        Heard::Garbled(_) | Heard::Connected => found(Cause::OtherProxy, missed),
        Heard::NoAddress | Heard::NotAsked(_) => None,
    }
}

/// Compares the answer of a `healthCheckNodePort`.
fn service(asking: &Asking, http: &Http, contact: Contact) -> Option<Difference> {
    let (wanted, count) = match asking.expected {
        Answer::Ok(count) => (200, count.unwrap_or(0)),
        _ => (503, 0),
    };
    match &http.spoken {
        Spoken::Service { service, .. } if Some(service) != asking.service.as_ref() => {
            found(Cause::OtherService, Level::Error)
        }
        Spoken::Service { .. } if contact.cut_off && http.status == 503 && wanted == 200 => {
            found(Cause::CutOff, Level::Error)
        }
        Spoken::Service { healthy: Some(false), .. } if http.status == 503 && wanted == 200 => {
            found(Cause::UnhealthyProxy, Level::Error)
        }
        Spoken::Service { healthy: Some(false), .. } if http.status == 503 => {
            found(Cause::UnhealthyProxy, Level::Warning)
        }
        // The balancer is to send elsewhere: these objects do not say so, the machine does.
        Spoken::Service { leaving: true, .. } if http.status == 503 && wanted == 200 => {
            found(Cause::Leaving, Level::Warning)
        }
        Spoken::Service { .. } if http.status != wanted => match http.status {
            200 | 503 => found(Cause::StaleProxy, Level::Error),
            _ => found(Cause::OtherProxy, Level::Error),
        },
        Spoken::Service { endpoints, .. } if *endpoints != count => found(Cause::StaleProxy, Level::Warning),
        // Balancers that weight nodes read it; kube-proxy and the agent both send it.
        Spoken::Service { healthy, endpoints, .. } => {
            let as_kube_proxy = healthy.is_some() && http.weight == Some(*endpoints);
            if as_kube_proxy { None } else { found(Cause::OtherProxy, Level::Note) }
        }
        Spoken::Proxy { .. } | Spoken::Other => other(http.status == wanted),
    }
}

/// Compares the answer of `/healthz`.
fn proxy(asking: &Asking, http: &Http) -> Option<Difference> {
    let wanted = if asking.expected.is_healthy() { 200 } else { 503 };
    let Spoken::Proxy { eligible, healthy, leaving, cut_off, .. } = http.spoken else {
        return other(http.status == wanted);
    };
    match (wanted, http.status) {
        (200, 200) | (503, 503) if eligible.is_none() => found(Cause::OtherProxy, Level::Note),
        (200, 200) | (503, 503) => None,
        (200, 503) if cut_off => found(Cause::CutOff, Level::Error),
        (200, 503) if leaving && healthy != Some(false) => found(Cause::Leaving, Level::Warning),
        (200, 503) if eligible == Some(false) && healthy != Some(false) => {
            found(Cause::StaleProxy, Level::Error)
        }
        (200, 503) => found(Cause::UnhealthyProxy, Level::Error),
        // This proxy does not look at the Node object.
        (503, 200) if eligible.is_none() => found(Cause::OtherProxy, Level::Warning),
        (503, 200) => found(Cause::StaleProxy, Level::Error),
        _ => found(Cause::OtherProxy, Level::Error),
    }
}

const fn other(same_status: bool) -> Option<Difference> {
    found(Cause::OtherProxy, if same_status { Level::Note } else { Level::Error })
}

/// Compares the answer of a node port.
fn traffic(expected: Answer, heard: &Heard, contact: Contact) -> Option<Difference> {
    let nobody = if contact.proxy_refused { Cause::DeadAgent } else { Cause::NothingListens };
    match (expected, heard) {
        (Answer::Open, Heard::Refused) => found(nobody, Level::Error),
        (Answer::Open, Heard::Silence) => found(Cause::Firewall, Level::Error),
        (Answer::Open, Heard::Unreachable) => found(Cause::WrongAddress, Level::Error),
        (Answer::Silence | Answer::Refused, Heard::Connected) => found(Cause::StaleProxy, Level::Warning),
        (Answer::Silence, Heard::Refused) => found(nobody, Level::Warning),
        (Answer::Silence | Answer::Refused, Heard::Unreachable) => found(Cause::WrongAddress, Level::Warning),
        // ICMP errors are rate-limited, and some firewalls drop them.
        (Answer::Refused, Heard::Silence) => found(Cause::Firewall, Level::Note),
        _ => None,
    }
}
