//! Connections of an earlier proxy within the run loop: entered once behind the first sync (`--adopt`), and followed to their end by
//! whichever agent runs.

use std::{
    io,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use tokio::task::{JoinHandle, spawn_blocking};

use super::PacketPath;
use crate::{
    check,
    dataplane::Adopted,
    node::{
        conntrack::{self, Connection},
        ipvs, kept_nat,
    },
};

/// Reading conntrack may take up to one of so many parts of the time.
const SHARE: u32 = 20;

/// Connections read from conntrack, and the time that took.
type Read = (io::Result<Vec<Connection>>, Duration);

/// State of the adoption.
#[derive(Debug)]
pub(super) struct Adoption {
    /// `--adopt`, until that is done.
    wanted: bool,
    /// NAT is kept for connections.
    keeping: bool,
    reading: Option<JoinHandle<Read>>,
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

/// Sentences about what was adopted: of those that go on, and of those that were not adopted.
pub(super) fn report(adopted: &Adopted) {
    let not_adopted = adopted.not_adopted();
    tracing::info!(
        tcp = adopted.tcp,
        udp = adopted.udp,
        "adopted kube-proxy's connections: conntrack translates them until they end; its rules may be removed now"
    );
    if !not_adopted.is_empty() {
        tracing::warn!("not adopted, of kube-proxy's connections: {}", not_adopted.join("; "));
    }
}

impl Adoption {
    pub(super) fn new(wanted: bool) -> Self {
        Self { wanted, keeping: false, reading: None, next: Instant::now() }
    }

    /// Adopts, if that is wanted and not done. Whether the maps are to be written again.
    pub(super) async fn adopt(&mut self, path: &mut impl PacketPath) -> bool {
        if !std::mem::take(&mut self.wanted) {
            return false;
        }
        if let Some(left_out) = ipvs::not_adopted() {
            tracing::warn!("not adopted: {left_out}; `check --migrate` has the steps");
        }
        match self.enter_all(path).await {
            Ok(adopted) => report(&adopted),
            Err(error) => tracing::error!(
                "kube-proxy's connections were not adopted, and end when its rules are removed; `adopt` tries again: {error:#}"
            ),
        }
        path.end_adopting()
    }

    async fn enter_all(&mut self, path: &mut impl PacketPath) -> Result<Adopted> {
        let (connections, _) = begin().await.context("conntrack was not read to its end")?;
        let adopted = path.adopt_connections(&connections.context("conntrack cannot be read")?)?;
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
        if self.wanted || self.is_reading() || Instant::now() < self.next {
            return;
        }
        if !self.keeping {
            // `adopt`, or an earlier agent.
            self.keeping = matches!(spawn_blocking(kept_nat::is_there).await, Ok(Ok(true)));
        }
        self.reading = self.keeping.then(begin);
    }

    pub(super) fn is_reading(&self) -> bool {
        self.reading.is_some()
    }

    /// Waits for what is being read. Cancel-safe.
    pub(super) async fn read(&mut self) -> Option<Read> {
        let read = self.reading.as_mut()?.await.ok();
        self.reading = None;
        read
    }

    /// Follows what was read.
    pub(super) fn follow(&mut self, read: Option<Read>, path: &mut impl PacketPath) {
        let Some((connections, took)) = read else { return };
        self.next = Instant::now() + took * SHARE;
        let followed = connections.map_err(anyhow::Error::from).and_then(|connections| {
            let adopted = path.adopt_connections(&connections)?;
            if adopted.live() + adopted.no_room + adopted.begun_anew == 0 && !check::kube_proxy_has_rules() {
                kept_nat::release()?;
                self.keeping = false;
                tracing::info!("the last connection of kube-proxy has ended: NAT is not kept any more");
            }
            Ok(())
        });
        if let Err(error) = followed {
            tracing::warn!("following kube-proxy's connections failed, trying again: {error:#}");
        }
    }
}

fn begin() -> JoinHandle<Read> {
    spawn_blocking(|| {
        let start = Instant::now();
        (conntrack::translated(), start.elapsed())
    })
}
