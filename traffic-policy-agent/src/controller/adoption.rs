//! Connections of an earlier proxy within the run loop: entered once after the first sync
//! (`--adopt`), and followed to their end by any later agent.

use std::{
    io,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use tokio::{
    task::{JoinHandle, spawn_blocking, yield_now},
    time,
};
use traffic_policy_dataplane::{
    Adopted, ConnectionAdoption,
    node::{
        conntrack::{self, Connection},
        ipvs, kept_nat,
    },
};

use crate::check;

/// Ratio of the pause after a read of conntrack to the time that the read took.
const SHARE: u32 = 20;

/// Length of a piece of adoption; [`AGAIN`] is the pause after it.
const FOR: Duration = Duration::from_micros(500);
const AGAIN: Duration = Duration::from_millis(1);

/// Connections read from conntrack, and the time that the read took.
type Read = (io::Result<Vec<Connection>>, Duration);

/// State of the adoption.
#[derive(Debug)]
pub(super) struct Adoption {
    /// Whether `--adopt` is given and not done yet.
    wanted: bool,
    /// Whether NAT is kept for connections.
    keeping: bool,
    reading: Option<JoinHandle<Read>>,
    /// Whether the connections that were read are being compared with the tables.
    following: bool,
    /// Time at which the comparison continues.
    next_piece: time::Instant,
    /// Earliest time at which conntrack may be read again.
    next: Instant,
}

/// Fails where `--adopt` cannot work on this node, before anything is changed.
pub(super) fn check_node() -> Result<()> {
    conntrack::translated().map(drop).context(
        "the connections of kube-proxy cannot be read from conntrack (is the module nf_conntrack_netlink there?): without --adopt they end when its rules are removed",
    )?;
    kept_nat::is_there()
        .map(drop)
        .context("nf_tables cannot be asked, which keeps NAT for the connections of kube-proxy")
}

/// Logs what was adopted: the connections that continue, and those that were not adopted.
pub(super) fn report(adopted: &Adopted) {
    let not_adopted = adopted.not_adopted();
    tracing::info!(
        tcp = adopted.tcp,
        udp = adopted.udp,
        sctp = adopted.sctp,
        "adopted kube-proxy's connections: conntrack translates them until they end; its rules may be removed now"
    );
    if !not_adopted.is_empty() {
        tracing::warn!("not adopted, of kube-proxy's connections: {}", not_adopted.join("; "));
    }
}

impl Adoption {
    pub(super) fn new(wanted: bool) -> Self {
        let (now, next_piece) = (Instant::now(), time::Instant::now());
        Self { wanted, keeping: false, reading: None, following: false, next_piece, next: now }
    }

    /// Adopts, if that is wanted and not done; `beat` is called meanwhile. Returns whether the maps
    /// are to be written again.
    pub(super) async fn adopt(
        &mut self,
        path: &mut impl ConnectionAdoption,
        beat: &(dyn Fn() + Sync),
    ) -> bool {
        if !std::mem::take(&mut self.wanted) {
            return false;
        }
        if let Some(left_out) = ipvs::not_adopted() {
            tracing::warn!("not adopted: {left_out}; `check --migrate` has the steps");
        }
        match self.enter_all(path, beat).await {
            Ok(adopted) => report(&adopted),
            Err(error) => tracing::error!(
                "kube-proxy's connections were not adopted, and end when its rules are removed; `adopt` tries again: {error:#}"
            ),
        }
        path.end_adopting()
    }

    async fn enter_all(
        &mut self,
        path: &mut impl ConnectionAdoption,
        beat: &(dyn Fn() + Sync),
    ) -> Result<Adopted> {
        let (connections, _) = begin().await.context("conntrack was not read to its end")?;
        path.adopt_connections(connections.context("conntrack cannot be read")?);
        let adopted = finish(path, beat).await?;
        if adopted.live() + adopted.no_room > 0 {
            spawn_blocking(kept_nat::keep)
                .await?
                .context("the nftables table that keeps NAT cannot be made")?;
            self.keeping = true;
        }
        Ok(adopted)
    }

    /// Begins to read conntrack, if there is anything to follow and it is time.
    pub(super) async fn look(&mut self) {
        if self.wanted || self.is_reading() || self.following || Instant::now() < self.next {
            return;
        }
        if !self.keeping {
            // NAT was kept by `adopt`, or by an earlier agent.
            self.keeping = matches!(spawn_blocking(kept_nat::is_there).await, Ok(Ok(true)));
        }
        self.reading = self.keeping.then(begin);
    }

    pub(super) fn is_reading(&self) -> bool {
        self.reading.is_some()
    }

    /// Waits for the read that is under way. Cancel-safe.
    pub(super) async fn read(&mut self) -> Option<Read> {
        let read = self.reading.as_mut()?.await.ok();
        self.reading = None;
        read
    }

    /// Begins to follow the connections that were read.
    pub(super) fn follow(&mut self, read: Option<Read>, path: &mut impl ConnectionAdoption) {
        let Some((connections, took)) = read else { return };
        self.next = Instant::now() + took * SHARE;
        match connections {
            Ok(connections) => {
                path.adopt_connections(connections);
                self.following = true;
            }
            Err(error) => warn(&error.into()),
        }
    }

    pub(super) fn is_following(&self) -> bool {
        self.following
    }

    /// Returns the time at which following continues.
    pub(super) fn next_piece(&self) -> time::Instant {
        self.next_piece
    }

    /// Follows connections for a moment, and then yields the CPU: there may be half a million of
    /// them.
    pub(super) fn follow_on(&mut self, path: &mut impl ConnectionAdoption) {
        let start = Instant::now();
        while self.following && start.elapsed() < FOR {
            let followed = match path.adopt_on() {
                Ok(None) => continue,
                Ok(Some(adopted)) => self.followed(&adopted),
                Err(error) => Err(error),
            };
            self.following = false;
            if let Err(error) = followed {
                warn(&error);
            }
        }
        self.next_piece = time::Instant::now() + AGAIN;
    }

    /// Concludes when all connections that were read have been followed.
    fn followed(&mut self, adopted: &Adopted) -> Result<()> {
        if adopted.live() + adopted.no_room + adopted.begun_anew == 0 && !check::kube_proxy_has_rules() {
            kept_nat::release()?;
            self.keeping = false;
            tracing::info!("the last connection of kube-proxy has ended: NAT is not kept any more");
        }
        Ok(())
    }
}

/// Continues until all connections are adopted.
pub(super) async fn finish(path: &mut impl ConnectionAdoption, beat: &(dyn Fn() + Sync)) -> Result<Adopted> {
    loop {
        beat();
        if let Some(adopted) = path.adopt_on()? {
            return Ok(adopted);
        }
        yield_now().await;
    }
}

fn warn(error: &anyhow::Error) {
    tracing::warn!("following kube-proxy's connections failed, trying again: {error:#}");
}

fn begin() -> JoinHandle<Read> {
    spawn_blocking(|| {
        let start = Instant::now();
        (conntrack::translated(), start.elapsed())
    })
}
