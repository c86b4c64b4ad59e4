//! The frontends of one Service port in a plan, with its name, and the source ranges that they ask
//! for.

use std::collections::BTreeSet;

use ipnet::IpNet;
use traffic_policy_cluster::model::{ServicePort, ServicePortKey};
use traffic_policy_ebpf::abi::{self, Frontend};

use super::{
    super::{
        frontend::{self, Drain},
        op::Op,
    },
    Applied, Context, Plan, Planner,
};
use crate::dataplane::maps::keys::{FrontendId, Source};

impl Planner {
    /// Writes frontends that differ from those in the maps; the ranges that they name are planned.
    pub(super) fn write_frontends(
        &mut self,
        key: &ServicePortKey,
        applied: &Applied,
        sources: &BTreeSet<Source>,
        context: &Context<'_>,
        plan: &mut Plan,
    ) {
        let Applied { port, index, cluster, local, table, former } = applied;
        let drain = Drain { default: context.drain, now: context.monotonic };
        // Sources are allowed before the frontends require them, and removed after.
        for source in sources {
            if self.held.sources.insert(*source) {
                self.budget.source_ranges.add(source.ipv6);
                plan.ops.push(Op::AddSourceRange(*source));
            }
        }
        let info = frontend::info(key, port);
        if self.held.names.get(index) != Some(&info) {
            plan.ops.push(Op::SetInfo(*index, Box::new(info)));
            self.held.names.insert(*index, info);
        }
        for id_and_kind in &port.frontends {
            let id = FrontendId { address: id_and_kind.address, protocol: key.protocol };
            let held = self.held.frontends.get(&id).copied();
            let own = context.addresses.contains(&id.address.ip());
            let mut flags = frontend::flags(port, id_and_kind.kind, own, table.range.len > 0);
            if context.adopting {
                flags |= abi::frontend::ADOPTING;
            }
            // Open flows go on as they began.
            flags |= held.map_or(0, |held| held.flags & abi::frontend::OPENS_REPLIES);
            let drain_until = frontend::drain_until(port, id_and_kind.kind, flags, local.len, held, drain);
            let affinity = frontend::affinity(port);
            let wanted = Frontend {
                service: *index,
                flags,
                cluster: *cluster,
                local: *local,
                maglev: table.range,
                drain_until,
                affinity,
                digest: table.digest,
                former: former.tables,
                former_list: former.list,
                former_until: former.until,
            };
            if held != Some(wanted) {
                plan.ops.push(Op::SetFrontend(id, wanted));
                if self.held.frontends.insert(id, wanted).is_none() {
                    self.budget.frontends.add(key.ipv6);
                }
            }
        }
    }
}

/// Returns the source ranges of a Service port.
pub(super) fn sources(key: &ServicePortKey, port: &ServicePort, index: u32) -> BTreeSet<Source> {
    let source = |range: &IpNet| Source { ipv6: key.ipv6, service: index, range: range.trunc() };
    port.source_ranges.iter().map(source).collect()
}
