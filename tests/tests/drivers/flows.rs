//! Requests and transfers to every place, with every protocol.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::Protocol;
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::traffic::transfer::transfer;

use crate::fixture::{CardTestbed, Place};

/// The time limit of a request; one without an answer by then is lost: TCP has retransmitted it
/// several times.
const PATIENCE: Duration = Duration::from_secs(10);

impl CardTestbed {
    /// Checks that every endpoint answers with both families and protocols, and sees the right
    /// address.
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

    /// Transfers `bytes` bytes in each direction with every endpoint; every byte must arrive
    /// unchanged.
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

/// The fewest packets that a hook must have handled for [`CardTestbed::requests`] and megabytes of
/// [`CardTestbed::transfers`]: the stack may merge segments to 64 KiB, 16 packets for each
/// megabyte, before TC or generic XDP on a VLAN sees them.
pub const LEAST: u64 = 150;

/// The number of packets that one hook has translated and forwarded or delivered.
pub fn served(agent: &Agent, hook: &str) -> Result<u64> {
    let status = agent.json(&["status"])?;
    let rows = status["counters"].as_array().context("status prints no counters")?;
    let done = rows.iter().filter(|row| {
        let outcome = row["outcome"].as_str().unwrap_or_default();
        row["hook"] == hook && (outcome.starts_with("forwarded") || outcome.starts_with("delivered"))
    });
    Ok(done.filter_map(|row| row["packets"].as_u64()).sum())
}

/// Checks that the packet path handled every packet.
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
