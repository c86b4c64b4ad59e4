//! The nodes that this one looks after: if the agent of such a node does not renew its Lease, the
//! others are told that it opens no packets. It may have been removed without a word, or follow no
//! changes any more.
//!
//! Only this node's clock counts. An agent that renewed late, or was misjudged, says again that its
//! node opens packets; until then flows that begin use SNAT.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;

use super::{
    PERIODS,
    lease::{self, Leases},
};

/// The longest time for which a Lease may ask to count without a renewal.
const LONGEST: Duration = Duration::from_secs(3600);

/// The Leases of neighbours as they were last seen, by node.
#[derive(Debug, Default)]
pub(super) struct Neighbours(HashMap<String, Seen>);

#[derive(Debug)]
struct Seen {
    /// The version of the renewed Lease; `None`: there is none.
    version: Option<String>,
    since: Instant,
    /// The number of times that it was seen like this, without a failure in between.
    times: u32,
}

impl Neighbours {
    /// Looks at the Leases of these nodes. `lasting`: how long a Lease counts after its renewal if
    /// it does not say that itself.
    pub(super) async fn look(
        &mut self,
        leases: &Leases,
        nodes: &[String],
        lasting: Duration,
    ) -> Result<(), kube::Error> {
        self.0.retain(|node, _| nodes.contains(node));
        for node in nodes {
            let found = leases.find(&lease::name_renewed(node)).await?;
            let spec = found.as_ref().and_then(|lease| lease.spec.as_ref());
            let asked = spec.and_then(|spec| u64::try_from(spec.lease_duration_seconds?).ok());
            let lasting = asked.map_or(lasting, Duration::from_secs).min(LONGEST);
            let version = found.and_then(|lease| lease.metadata.resource_version);
            let silent = self.note(node, version, Instant::now());
            if silent.is_some_and(|silent| silent >= lasting) {
                let why = format!("its agent has not renewed its Lease for {} s", lasting.as_secs());
                if leases.stop_opening(node, &why).await? {
                    tracing::warn!(
                        "the other nodes are told to forward nothing directly to node {node}: {why}"
                    );
                }
                self.0.remove(node);
            }
        }
        Ok(())
    }

    /// Forgets what was seen: while the API server does not answer, nobody can renew a Lease.
    pub(super) fn forget(&mut self) {
        self.0.clear();
    }

    /// Notes the version of a Lease. Returns the time for which it has been the same, once it was
    /// seen often enough.
    fn note(&mut self, node: &str, version: Option<String>, now: Instant) -> Option<Duration> {
        match self.0.get_mut(node) {
            Some(seen) if seen.version == version => {
                seen.times += 1;
                (seen.times >= PERIODS).then(|| now - seen.since)
            }
            _ => {
                self.0.insert(node.to_owned(), Seen { version, since: now, times: 1 });
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_lease_that_is_renewed_or_not_seen_long_enough_counts() {
        let mut neighbours = Neighbours::default();
        let start = Instant::now();
        let mut note = |second: u64, version: &str| {
            let at = start + Duration::from_secs(second);
            neighbours.note("a", Some(version.to_owned()), at).map(|silent| silent.as_secs())
        };
        assert_eq!([note(0, "1"), note(20, "1"), note(40, "1")], [None; 3]);
        assert_eq!(note(60, "2"), None, "renewed");
        assert_eq!([note(80, "2"), note(100, "2"), note(120, "2")], [None, None, Some(60)]);
        assert_eq!(note(140, "2"), Some(80));
        neighbours.forget();
        assert_eq!(neighbours.note("a", Some("2".to_owned()), start), None, "the API server was away");
    }
}
