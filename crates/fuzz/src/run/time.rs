//! Steps of time, and sweeps.

use traffic_policy_dataplane::Sweeper;
use traffic_policy_ebpf::tcp::ASSURED;
use traffic_policy_testing::harness::SIZES;

use super::{compared::Compared, entries};
use crate::{
    model::{Fate, TIMEOUTS, duration},
    topology::{ENDPOINTS, Endpoint, TARGET},
};

/// Maximum number of entries for a sweep: from three quarters of a table on, flows are removed
/// early, which is tested elsewhere.
const MOST: usize = SIZES.flows4 as usize * 2 / 3;

/// Sweeps of a run, which remember what the last one has found.
#[derive(Default)]
pub struct Sweeps(Option<Sweeper>);

/// Advances time by this number of jiffies.
pub fn wait(compared: &mut Compared<'_>, jiffies: u32) {
    for entry in compared.harness.flows(compared.path.family) {
        compared.harness.change(&entry, |entry| entry.go_back(jiffies));
    }
    compared.harness.go_back_with_affinity(duration(jiffies));
    compared.model.clock += u64::from(jiffies);
}

impl Sweeps {
    /// Reports an endpoint that takes no more new flows of a Service, as the agent does, and
    /// sweeps.
    pub fn retire(
        &mut self,
        compared: &mut Compared<'_>,
        service: usize,
        endpoint: usize,
    ) -> Result<(), String> {
        let endpoint = ENDPOINTS[endpoint];
        compared.harness.name_removed(service as u32 + 1, endpoint.spot, TARGET);
        let swept = self.sweep(compared, Some((service, endpoint)));
        compared.harness.forget_removed();
        if swept? {
            compared.model.retire(service, endpoint);
        }
        Ok(())
    }

    /// Sweeps, unless the table is nearly full. Returns whether it did. `removed`: the endpoint
    /// of a Service whose flows are marked.
    pub fn sweep(
        &mut self,
        compared: &mut Compared<'_>,
        removed: Option<(usize, Endpoint)>,
    ) -> Result<bool, String> {
        let family = compared.path.family;
        let before = compared.harness.flows(family);
        if before.len() > MOST {
            return Ok(false);
        }
        let new = || Sweeper::new(TIMEOUTS, [SIZES.flows4, SIZES.flows6]);
        let sweeper = self.0.get_or_insert_with(new);
        let found = compared.harness.sweep(sweeper, removed.is_some())[family as usize];
        let after = compared.harness.flows(family);
        for (index, fate) in compared.model.sweep(removed).into_iter().enumerate().rev() {
            let flow = &compared.model.flows[index];
            let request = after.iter().any(|entry| entries::is_request_of(entry, flow));
            let reply = after.iter().any(|entry| entries::leads_back(entry, flow, family));
            match (fate, request, reply) {
                (Fate::Stays | Fate::Either, true, true) => {}
                (Fate::Goes | Fate::Either, false, false) => drop(compared.model.flows.remove(index)),
                _ => {
                    return Err(format!(
                        "a sweep: {fate:?}, but request entry: {request}, reply entry: {reply} of {flow:?}"
                    ));
                }
            }
        }
        if found.deleted == 0 && found.entries as usize != before.len() {
            return Err(format!("a sweep found {} of {} entries", found.entries, before.len()));
        }
        let unassured = after.iter().filter(|entry| entry.is_request() && entry.state & ASSURED == 0).count();
        if found.unassured as usize != unassured {
            return Err(format!(
                "a sweep counts {} of {unassured} flows that are not assured",
                found.unassured
            ));
        }
        Ok(true)
    }
}
