//! Replies of SCTP that go back through the node in front (`--forwarding tunnel`).
//!
//! Pods send aggregates of SCTP packets (GSO by fragments), around which the kernel puts no outer
//! packet (`bpf_skb_net_grow`), and behind the hook that sees them last they are divided. So the
//! agent has a pair of devices: the program at egress sends an aggregate to the first, which cannot
//! send one, so that the kernel divides it; at the second each packet passes the same program. The
//! pair is there once a Service of SCTP is forwarded so, and until `cleanup`.
//! <https://github.com/torvalds/linux/blob/v6.12/net/core/filter.c>

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};

use super::{Dataplane, bpf::attach::divider, maps::mmap::config, replacement::Replacement as _};
use crate::node::sctp_divider::{self, Pair};

/// The time after which a pair that could not be made is tried again.
const RETRY: Duration = Duration::from_secs(30);

/// The way of SCTP's replies through the node in front.
pub trait SctpReplies {
    /// Makes the pair of devices if a Service needs it, and puts the program back where somebody
    /// has removed it. A failure is logged, and tried again later.
    fn follow_divider(&mut self);

    /// Whether replies of SCTP can go back through the node in front.
    fn tunnels_sctp(&self) -> bool;
}

/// The pair of devices, as far as this agent has got.
#[derive(Debug, Default)]
pub(super) struct Divider {
    /// Whether a Service needs it, or an earlier agent has made it.
    pub(super) is_wanted: bool,
    pair: Option<Pair>,
    /// The last failure: its reason, and when to try again.
    failed: Option<(String, Instant)>,
}

impl SctpReplies for Dataplane {
    fn follow_divider(&mut self) {
        let waits = self.divider.failed.as_ref().is_some_and(|(_, again)| Instant::now() < *again);
        let is_of_use = self.divider.is_wanted && self.sctp.is_in_place() && self.opening.is_in_place();
        if !is_of_use || waits || self.is_replacing() {
            return;
        }
        let Some(links) = self.devices.links_folder().map(Path::to_owned) else { return };
        let before = self.divider.pair;
        match self.put_divider(&links) {
            Ok(pair) => {
                if before != Some(pair) {
                    tracing::info!(
                        device = sctp_divider::NAMES[0],
                        "replies of SCTP can go back through the node in front: the kernel divides their aggregates there"
                    );
                }
                self.maps.config.store(config::sctp_divided, pair.peer);
                self.maps.config.store(config::sctp_divider, pair.divider);
                (self.divider.pair, self.divider.failed) = (Some(pair), None);
            }
            Err(error) => {
                let why = format!("{error:#}");
                if self.divider.failed.as_ref().is_none_or(|(said, _)| *said != why) {
                    tracing::warn!(
                        "replies of SCTP cannot go back through the node in front, other nodes use SNAT towards this one: {why}"
                    );
                }
                self.maps.config.store(config::sctp_divider, 0);
                (self.divider.pair, self.divider.failed) = (None, Some((why, Instant::now() + RETRY)));
            }
        }
    }

    fn tunnels_sctp(&self) -> bool {
        self.divider.pair.is_some()
    }
}

impl Dataplane {
    /// Returns the device with the program.
    pub(super) fn divided(&self) -> Option<u32> {
        self.divider.pair.map(|pair| pair.peer)
    }

    /// Takes over the pair of an earlier agent, whose flows go on.
    pub(super) fn take_over_divider(&mut self) {
        self.divider.is_wanted = self.maps.config.load(config::sctp_divider) != 0;
        self.follow_divider();
    }

    fn put_divider(&mut self, links: &Path) -> Result<Pair> {
        let found = sctp_divider::find().context("looking for the pair of devices failed")?;
        let pair = match found {
            Some(pair)
                if self.divider.pair == Some(pair) && divider::is_intact(&self.object, links, pair) =>
            {
                return Ok(pair);
            }
            Some(pair) => pair,
            None => sctp_divider::create().context("the pair of devices cannot be made")?,
        };
        divider::attach(&mut self.object, links, pair, self.devices.kernel())?;
        Ok(pair)
    }
}
