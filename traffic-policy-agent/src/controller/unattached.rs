//! Devices without programs that lead to endpoints of other nodes: packets to those endpoints are
//! refused, and a log line and an Event name the reason.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::Result;
use traffic_policy_cluster::source::{ObjectEvent, Subject};
use traffic_policy_dataplane::{DevicePrograms, Figures, node::Network};

/// Number of endpoints whose routes are requested in one piece: one request to the kernel each.
const ASKED: usize = 1000;
/// Time after which a device that has led to no endpoint is reported anew if it leads to one again:
/// routes and devices of a network plugin come and go.
const FORGOTTEN: Duration = Duration::from_secs(3600);

/// The devices that have been reported, and the current round.
#[derive(Debug, Default)]
pub(super) struct Unattached {
    /// Number of packets that had been refused when the last round began.
    refused: u64,
    /// Endpoints that this round has not looked up yet; the next ones are last.
    left: Vec<IpAddr>,
    /// Reported devices by name, with the time at which each last led to an endpoint.
    told: BTreeMap<String, Instant>,
}

impl Unattached {
    /// Looks up where endpoints of other nodes are, if packets to some of them have been refused
    /// since the last time, and reports each device once: in the log, and by the Events that it
    /// returns. Without refusals nothing is looked up: a node may have very many endpoints.
    /// `named`: the value of `--device`.
    pub(super) async fn look(
        &mut self,
        network: &Network,
        path: &(impl DevicePrograms + Figures),
        named: &[String],
        endpoints: impl FnOnce() -> BTreeSet<IpAddr>,
    ) -> Result<Vec<ObjectEvent>> {
        let piece = self.piece(path.refused_unattached()?, endpoints);
        let mut behind: BTreeMap<u32, Vec<IpAddr>> = BTreeMap::new();
        for endpoint in &piece {
            if let Some(device) = network.device_towards(*endpoint).await {
                behind.entry(device).or_default().push(*endpoint);
            }
        }
        for (interface, _) in path.attached() {
            behind.remove(&interface.ifindex);
        }
        let mut found = BTreeMap::new();
        if !behind.is_empty() {
            let links = network.links().await?;
            for link in links.into_iter().filter(|link| !link.loopback) {
                found.extend(behind.remove(&link.index).map(|endpoints| (link.name, endpoints)));
            }
        }
        let report = |(device, endpoints): (String, Vec<IpAddr>)| {
            let message = sentence(&device, &endpoints, named);
            tracing::warn!("{message}");
            ObjectEvent::warning(Subject::Node, "UnattachedDevice", "Attach", message)
        };
        Ok(self.found(&piece, found, Instant::now()).into_iter().map(report).collect())
    }

    /// Returns the endpoints to be looked up now; none, unless packets have been refused since the
    /// last round began.
    fn piece(&mut self, refused: u64, endpoints: impl FnOnce() -> BTreeSet<IpAddr>) -> Vec<IpAddr> {
        if self.left.is_empty() && refused != self.refused {
            (self.refused, self.left) = (refused, endpoints().into_iter().collect());
        }
        self.left[self.left.len().saturating_sub(ASKED)..].to_vec()
    }

    /// Takes the endpoints of a piece, by the names of the devices that lead to them, and returns
    /// the devices to report. [`Self::piece`] returns the same piece until this is called.
    fn found(
        &mut self,
        piece: &[IpAddr],
        found: BTreeMap<String, Vec<IpAddr>>,
        now: Instant,
    ) -> Vec<(String, Vec<IpAddr>)> {
        self.left.truncate(self.left.len().saturating_sub(piece.len()));
        self.told.retain(|_, last| now.duration_since(*last) < FORGOTTEN);
        let news = |(device, _): &(String, Vec<IpAddr>)| self.told.insert(device.clone(), now).is_none();
        found.into_iter().filter(news).collect()
    }
}

/// Returns the report of a device: what is refused, why, and the remedy.
fn sentence(device: &str, endpoints: &[IpAddr], named: &[String]) -> String {
    let some: Vec<_> = endpoints.iter().take(3).map(ToString::to_string).collect();
    let more = match endpoints.len().saturating_sub(some.len()) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let (why, all) = if named.is_empty() {
        (
            "it was not found, for no default route and no route by a gateway leads there, and it has no address of the Node's".to_owned(),
            format!("every device that packets come by, {device} among them"),
        )
    } else {
        (format!("--device names {}", named.join(", ")), format!("{device}, too"))
    };
    format!(
        "connections to endpoints of other nodes behind {device} ({}{more}) are refused (dropped-unattached-device): nothing is attached to it, {why}; \
         name {all}, with --device",
        some.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn endpoints(count: u32) -> BTreeSet<IpAddr> {
        (0..count).map(|i| Ipv4Addr::from(0x0AF4_0000 + i).into()).collect()
    }

    fn behind(device: &str, piece: &[IpAddr]) -> BTreeMap<String, Vec<IpAddr>> {
        BTreeMap::from([(device.to_owned(), piece.to_vec())])
    }

    #[test]
    fn all_endpoints_are_asked_for_in_pieces_after_a_refusal() {
        let mut unattached = Unattached::default();
        let walks = std::cell::Cell::new(0);
        let all = || {
            walks.set(walks.get() + 1);
            endpoints(2500)
        };
        assert!(unattached.piece(0, all).is_empty(), "nothing was refused");
        let mut asked = BTreeSet::new();
        for expected in [1000, 1000, 500] {
            // The same piece is returned again, as after an error of the kernel: nothing was found
            // for the first one.
            let first = unattached.piece(7, all);
            let piece = unattached.piece(7, all);
            assert_eq!((first.len(), &first), (expected, &piece));
            asked.extend(piece.iter().copied());
            let last = behind("eth1", &piece[piece.len() - 1..]);
            let news = unattached.found(&piece, last, Instant::now());
            assert_eq!(news.len(), usize::from(asked.len() == 1000), "{news:?}");
        }
        assert_eq!(asked, endpoints(2500));
        assert!(unattached.piece(7, all).is_empty(), "nothing was refused since");
        assert_eq!(walks.get(), 1, "all are put together once a round");
        assert_eq!(unattached.piece(8, all).len(), 1000);
    }

    #[test]
    fn a_device_that_is_gone_for_a_while_is_told_of_once() {
        let mut unattached = Unattached::default();
        let start = Instant::now();
        let mut look = |refused, device: Option<&str>, minutes: u64| {
            let piece = unattached.piece(refused, || endpoints(1));
            let found = device.map(|device| behind(device, &piece)).unwrap_or_default();
            unattached.found(&piece, found, start + Duration::from_secs(60 * minutes)).len()
        };
        assert_eq!(look(1, Some("eth1"), 0), 1);
        assert_eq!(look(2, None, 10), 0);
        assert_eq!(look(3, Some("eth1"), 20), 0);
        assert_eq!(look(4, None, 70), 0);
        assert_eq!(look(5, Some("eth1"), 81), 1, "long gone");
    }

    #[test]
    fn the_sentence_says_why_and_what_to_do() {
        let endpoints: Vec<IpAddr> = (1..=5).map(|last| IpAddr::from([10, 244, 2, last])).collect();
        let named = sentence("eth1", &endpoints[..2], &["eth0".to_owned()]);
        assert!(
            named.contains("(10.244.2.1, 10.244.2.2)") && named.contains("--device names eth0;"),
            "{named}"
        );
        assert!(named.ends_with("name eth1, too, with --device"), "{named}");
        let found = sentence("eth1", &endpoints, &[]);
        assert!(
            found.contains("10.244.2.3 and 2 more") && found.contains("no route by a gateway"),
            "{found}"
        );
    }
}
