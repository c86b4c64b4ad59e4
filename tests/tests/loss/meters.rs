//! All three meters at once, and the kernel's own count of lost segments.

use std::fmt::Write;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::netns::Namespace;
use traffic_policy_testing::traffic::{
    Datagrams, HeldConnections, Ledger, NewConnections, connections, datagrams, held, retransmissions,
};

/// Numbered datagrams per second in each direction.
const DATAGRAMS_PER_SECOND: u32 = 5000;
const CONNECTIONS_PER_SECOND: u32 = 100;
/// The least time before a segment is sent again. Beside other tests an acknowledgement may be late
/// by a quarter of a second.
const LATE: Duration = Duration::from_secs(2);

/// Has the ends of all connections wait that long. Before servers are started: what they accept
/// waits as long as their listeners.
pub fn wait_before_sending_again(lab: &Lab) {
    for (_, netns) in ends(lab) {
        retransmissions::wait_before_sending_again(netns, LATE).unwrap();
    }
}

/// The running meters of one phase.
pub struct Meters {
    what: String,
    start: Instant,
    lost: Vec<(String, u64)>,
    resets: Vec<(String, u64)>,
    datagrams: Datagrams,
    held: HeldConnections,
    new: NewConnections,
}

/// The reports of the meters.
pub struct Counted {
    pub datagrams: datagrams::Report,
    pub held: held::Report,
    pub new: connections::Report,
    /// TcpRetransSegs of each end.
    lost: Vec<(String, u64)>,
    /// All reports as text.
    pub report: String,
}

impl Counted {
    /// Whether nothing was lost.
    pub fn is_clean(&self) -> bool {
        let reports = self.datagrams.is_clean() && self.held.is_clean() && self.new.is_clean();
        reports && self.lost.iter().all(|(_, segments)| *segments == 0)
    }
}

impl Meters {
    /// Starts the meters at the client: datagrams to `targets[0]`, connections to all in turn.
    pub fn start(what: &str, lab: &Lab, targets: &[SocketAddr], ledger: &Ledger) -> Self {
        let (client, start) = (lab.client().netns(), Instant::now());
        wait_before_sending_again(lab);
        let (lost, resets) = (lost(lab), resets(lab));
        let held = HeldConnections::start(client, targets, 20, Duration::from_millis(20)).unwrap();
        let datagrams = Datagrams::start(client, targets[0], 20, DATAGRAMS_PER_SECOND, ledger).unwrap();
        let each = targets.to_vec();
        let choose = move |number| each.get(usize::try_from(number).ok()? % each.len()).copied();
        let new = NewConnections::start(client, CONNECTIONS_PER_SECOND, choose);
        Self { what: what.to_owned(), start, lost, resets, datagrams, held, new }
    }

    /// Stops, prints the figures, and fails unless nothing was lost.
    pub fn finish(self, lab: &Lab) -> Counted {
        let counted = self.stop(lab);
        assert!(counted.is_clean(), "{}", counted.report);
        counted
    }

    /// Stops and prints the figures.
    pub fn stop(self, lab: &Lab) -> Counted {
        let datagrams = self.datagrams.finish().unwrap();
        let (held, new) = (self.held.finish(), self.new.finish());
        // One that was late is known to have come twice only afterwards.
        let lost = since(self.lost, lost(lab));
        let resets = since(self.resets, resets(lab)).into_iter().filter(|(_, resets)| *resets > 0);
        let resets: Vec<_> = resets.collect();
        let seconds = self.start.elapsed().as_secs_f64();
        let mut report = format!("{}, {seconds:.1} s\n  {datagrams}\n  {held}\n  {new}\n", self.what);
        write!(report, "  segments lost: {lost:?}; resets by the kernel of: {resets:?}").unwrap();
        println!("{report}");
        Counted { datagrams, held, new, lost, report }
    }
}

/// The namespaces of both ends of all connections.
fn ends(lab: &Lab) -> impl Iterator<Item = (&str, &Namespace)> {
    lab.namespaces().into_iter().filter(|(role, _)| *role == "client" || role.starts_with("pod"))
}

/// The lost segments of both ends of all connections, closed ones included.
fn lost(lab: &Lab) -> Vec<(String, u64)> {
    let count = |netns| retransmissions::lost_in_namespace(netns).unwrap();
    ends(lab).map(|(role, netns)| (role.to_owned(), count(netns))).collect()
}

/// The resets that the kernel has sent in each namespace, mostly because a packet came to no
/// connection. Those of the packet path are not among them.
pub fn resets(lab: &Lab) -> Vec<(String, u64)> {
    let count = |netns| retransmissions::resets_of_namespace(netns).unwrap();
    lab.namespaces().into_iter().map(|(role, netns)| (role.to_owned(), count(netns))).collect()
}

/// Returns the growth of each count.
fn since(before: Vec<(String, u64)>, after: Vec<(String, u64)>) -> Vec<(String, u64)> {
    let pairs = before.into_iter().zip(after);
    pairs.map(|((role, before), (_, after))| (role, after.saturating_sub(before))).collect()
}

/// The addresses of both families that `port_of` returns; the first one gets the datagrams.
pub fn both(first: Family, port_of: impl Fn(Family) -> SocketAddr) -> [SocketAddr; 2] {
    let other = if first == Family::V4 { Family::V6 } else { Family::V4 };
    [port_of(first), port_of(other)]
}
