//! Steps of time, and sweeps.

use traffic_policy_dataplane::Sweeper;
use traffic_policy_ebpf::tcp::ASSURED;
use traffic_policy_testing::harness::SIZES;

use super::Run;
use crate::{
    model::{Fate, TIMEOUTS, duration},
    topology::{ENDPOINTS, Endpoint, TARGET},
};

/// Maximum number of entries for a sweep: from three quarters of a table on, flows are removed
/// early, which is tested elsewhere.
const MOST: usize = SIZES.flows4 as usize * 2 / 3;

impl Run<'_> {
    /// Advances time by this number of jiffies.
    pub(super) fn wait(&mut self, jiffies: u32) {
        for entry in self.harness.flows(self.path.family) {
            self.harness.change(&entry, |entry| entry.go_back(jiffies));
        }
        self.harness.go_back_with_affinity(duration(jiffies));
        self.model.clock += u64::from(jiffies);
    }

    /// Reports an endpoint that takes no more new flows of a Service, as the agent does, and
    /// sweeps.
    pub(super) fn retire(&mut self, service: usize, endpoint: usize) -> Result<(), String> {
        let endpoint = ENDPOINTS[endpoint];
        self.harness.name_gone(service as u32 + 1, endpoint.spot, TARGET);
        let swept = self.sweep(Some((service, endpoint)));
        self.harness.forget_gone();
        if swept? {
            self.model.retire(service, endpoint);
        }
        Ok(())
    }

    /// Sweeps, unless the table is nearly full. Returns whether it did. `gone`: the endpoint of a
    /// Service whose flows are marked.
    pub(super) fn sweep(&mut self, gone: Option<(usize, Endpoint)>) -> Result<bool, String> {
        let family = self.path.family;
        let before = self.harness.flows(family);
        if before.len() > MOST {
            return Ok(false);
        }
        let new = || Sweeper::new(TIMEOUTS, [SIZES.flows4, SIZES.flows6]);
        let sweeper = self.sweeper.get_or_insert_with(new);
        let found = self.harness.sweep(sweeper, gone.is_some())[family as usize];
        let after = self.harness.flows(family);
        for (index, fate) in self.model.sweep(gone).into_iter().enumerate().rev() {
            let flow = &self.model.flows[index];
            let request = after.iter().any(|entry| flow.has_request(entry));
            let reply = after.iter().any(|entry| flow.has_reply(entry, family));
            match (fate, request, reply) {
                (Fate::Stays | Fate::Either, true, true) => {}
                (Fate::Goes | Fate::Either, false, false) => drop(self.model.flows.remove(index)),
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
