//! This project's own annotations of Services. Values that cannot be parsed are left out and
//! reported with the object.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::problems::{Problems, quoted};
use crate::model::{
    ALGORITHM_ANNOTATION, Algorithm, FALLBACK_ANNOTATION, FORWARDING_ANNOTATION, Forwarding,
    HEALTH_PORT_ANNOTATION, WEIGHT_ANNOTATION, Weights, parse_duration,
};

const DRAIN_ANNOTATION: &str = "traffic-policy.io/drain";
const LONGEST_DRAIN: Duration = Duration::from_secs(24 * 3600);

fn text<'a>(metadata: &'a ObjectMeta, annotation: &str) -> Option<&'a str> {
    metadata.annotations.as_ref()?.get(annotation).map(String::as_str)
}

fn tell(problems: &mut Problems, annotation: &str, what: &str) {
    problems.tell(&format!("metadata.annotations[{annotation}]"), what);
}

pub(super) fn drain(metadata: &ObjectMeta, problems: &mut Problems) -> Option<Duration> {
    let text = text(metadata, DRAIN_ANNOTATION)?;
    let Some(drain) = parse_duration(text) else {
        let what = format!("{} is not a duration such as 30s, 1m or 0, and is ignored", quoted(text));
        tell(problems, DRAIN_ANNOTATION, &what);
        return None;
    };
    if drain > LONGEST_DRAIN {
        let what = format!("{} is longer than 24h, which is taken instead", quoted(text));
        tell(problems, DRAIN_ANNOTATION, &what);
    }
    Some(drain.min(LONGEST_DRAIN))
}

/// Returns the port of the annotation; 0 if there is none.
pub(super) fn health_port(metadata: &ObjectMeta, problems: &mut Problems) -> u16 {
    let Some(text) = text(metadata, HEALTH_PORT_ANNOTATION) else { return 0 };
    let port = text.parse().unwrap_or(0);
    if port == 0 {
        let what = format!("{} is not a port such as 31999, and is ignored", quoted(text));
        tell(problems, HEALTH_PORT_ANNOTATION, &what);
    }
    port
}

/// Whether external traffic is forwarded as under policy Cluster where policy Local would drop it.
pub(super) fn external_fallback(metadata: &ObjectMeta, problems: &mut Problems) -> bool {
    match text(metadata, FALLBACK_ANNOTATION) {
        None => false,
        Some("cluster") => true,
        Some(other) => {
            let what = format!(
                "{} is not \"cluster\", the only value that it may have, and is ignored",
                quoted(other)
            );
            tell(problems, FALLBACK_ANNOTATION, &what);
            false
        }
    }
}

/// Returns the way of packets to endpoints of other nodes; `None` without the annotation.
pub(super) fn forwarding(metadata: &ObjectMeta, problems: &mut Problems) -> Option<Forwarding> {
    let text = text(metadata, FORWARDING_ANNOTATION)?;
    let forwarding = Forwarding::parse(text);
    if forwarding.is_none() {
        let what = format!("{} is neither snat, direct nor tunnel, and is ignored", quoted(text));
        tell(problems, FORWARDING_ANNOTATION, &what);
    }
    forwarding
}

/// Returns the algorithm of the annotation; `None` if there is none.
pub(super) fn algorithm(metadata: &ObjectMeta, problems: &mut Problems) -> Option<Algorithm> {
    let text = text(metadata, ALGORITHM_ANNOTATION)?;
    let algorithm = text.parse().ok();
    if algorithm.is_none() {
        let what = format!("{} is neither \"random\" nor \"maglev\", and is ignored", quoted(text));
        tell(problems, ALGORITHM_ANNOTATION, &what);
    }
    algorithm
}

/// Returns the weights of the annotation; those that are equal if there is none.
pub(super) fn weights(metadata: &ObjectMeta, problems: &mut Problems) -> Weights {
    let Some(text) = text(metadata, WEIGHT_ANNOTATION) else { return Weights::default() };
    text.parse().unwrap_or_else(|error: String| {
        // The text of an entry may be as long as an annotation.
        let what = format!("{} is ignored: {}", quoted(text), error.chars().take(200).collect::<String>());
        tell(problems, WEIGHT_ANNOTATION, &what);
        Weights::default()
    })
}
