//! Limits of the listeners, which several pages name.

use traffic_policy_agent::health::{Connections, Served};

use crate::page;

#[test]
fn limits_of_listeners_are_those_of_the_code() {
    let (peer, all) = (Connections::PER_PEER, Connections::ALL);
    let (seconds, kib) = (Served::HEADER_TIMEOUT.as_secs(), Served::HEADERS >> 10);
    for (path, sentences) in [
        (
            "SECURITY.md",
            [
                format!("At most {peer} connections of a peer on a port and {all} in all"),
                format!("headers must come within {seconds} s"),
            ],
        ),
        (
            "docs/security.md",
            [
                format!("{peer} connections of a peer (IPv6: of a /64) on a port, {all} in all"),
                format!("{seconds} s and {kib} KiB for a request's headers"),
            ],
        ),
        (
            "docs/operating.md",
            [
                format!("at most {peer} on a port"),
                format!("within {seconds} s is disconnected; headers may have {kib} KiB"),
            ],
        ),
    ] {
        let text = page::text(path).split_whitespace().collect::<Vec<_>>().join(" ");
        for sentence in sentences {
            assert!(text.contains(&sentence), "{path} does not say {sentence:?}");
        }
    }
}
