//! Requests and transfers to every place, by every protocol.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::Protocol;
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::traffic::transfer::transfer;

use crate::fixture::{CardTestbed, Place};

/// A request that was not answered by then is lost: TCP has sent it again several times.
const PATIENCE: Duration = Duration::from_secs(10);

impl CardTestbed {
    /// Every endpoint answers by both families and protocols, and sees the address it should.
    pub fn requests(&self) -> Result<()> {
        for place in Place::ALL {
            for family in Family::BOTH {
                for protocol in Protocol::BOTH {
                    let to = self.at(place, family);
                    let asked = protocol.probe(to).limit(PATIENCE).from(&self.client)?.answer();
                    let answer = asked.with_context(|| format!("{place:?} {family:?} {protocol:?}"))?;
                    ensure!(answer.pod == place.pod(), "{place:?} {family:?} {protocol:?}: {answer:?}");
                    let seen = answer.client.ip();
                    ensure!(seen == self.seen(place, family), "{place:?} {family:?} {protocol:?}: {seen}");
                }
            }
        }
        Ok(())
    }

    /// So many bytes each way with every endpoint, and every byte arrives as it was sent.
    pub fn transfers(&self, bytes: u64) -> Result<()> {
        for place in Place::ALL {
            for family in Family::BOTH {
                let done = transfer(&self.client, self.at(place, family), bytes);
                let done = done.with_context(|| format!("{place:?} {family:?}"))?;
                println!("{place:?} {family:?}: {done:?}");
            }
        }
        Ok(())
    }
}

/// Least share that a hook must have served of [`CardTestbed::requests`] and megabytes of [`CardTestbed::transfers`]: the stack may merge
/// segments to 64 KiB, 16 packets a megabyte, before TC or generic XDP on a VLAN sees them.
pub const LEAST: u64 = 150;

/// Packets that one hook has translated and sent on or delivered.
pub fn served(agent: &Agent, hook: &str) -> Result<u64> {
    let status = agent.json(&["status"])?;
    let rows = status["counters"].as_array().context("status prints no counters")?;
    let done = rows.iter().filter(|row| {
        let outcome = row["outcome"].as_str().unwrap_or_default();
        row["hook"] == hook && (outcome.starts_with("forwarded") || outcome.starts_with("delivered"))
    });
    Ok(done.filter_map(|row| row["packets"].as_u64()).sum())
}

/// The packet path gave up on nothing.
pub fn nothing_failed(agent: &Agent) -> Result<()> {
    for hook in ["xdp", "tc-ingress", "tc-egress"] {
        for outcome in
            ["dropped-internal-error", "dropped-mtu-exceeded", "passed-malformed", "passed-missed-tail-call"]
        {
            let packets = agent.packets(hook, outcome)?;
            ensure!(packets == 0, "{hook}: {packets} packets {outcome}");
        }
    }
    Ok(())
}
