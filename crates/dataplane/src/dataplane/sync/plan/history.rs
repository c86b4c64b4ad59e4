//! Former owners of Maglev tables in a plan: when they are written, kept and freed.

use std::{collections::BTreeSet, time::Instant};

use traffic_policy_cluster::model::{Desired, ServicePort, ServicePortKey};
use traffic_policy_ebpf::abi::IndexRange;

use super::{
    super::{
        former::{Former, History, LASTS, Owners},
        tables::Table,
    },
    Applied, Context, Plan, Planner,
    takeover::Place,
};

impl Planner {
    /// Returns the former owners of a Service port's new list and table, which `plan` writes if the
    /// table has changed.
    pub(super) fn keep_former(
        &mut self,
        key: &ServicePortKey,
        port: &ServicePort,
        (old, cluster, table): (&Place, IndexRange, Table),
        context: &Context<'_>,
        plan: &mut Plan,
    ) -> Former {
        if !port.forwarding.is_direct() || table.range.len == 0 {
            return Former::default();
        }
        let is_usable = old.former.is_valid(context.monotonic) && old.former.slots == table.range.len;
        let kept = if is_usable { old.former } else { Former::default() };
        if old.table == table || old.table.range.len != table.range.len {
            return kept;
        }
        let before = (context.tables)(old.table.range);
        let former = kept.each_table().map(context.tables).collect::<anyhow::Result<Vec<_>>>();
        let (before, former) = match before.and_then(|before| Ok((before, former?))) {
            Ok(tables) => tables,
            Err(error) => {
                tracing::warn!(
                    "the former owners of {key} are unknown: its established connections do not go on by \
                     another node whose endpoint has just changed: {error:#}"
                );
                return kept;
            }
        };
        let Some(after) = table.written_by(&plan.ops) else { return kept };
        let list = |range: IndexRange| self.lists.get(key.ipv6, range);
        let history = History::after(
            Owners { endpoints: list(old.cluster), places: &before },
            Owners { endpoints: list(cluster), places: &after },
            if is_usable { list(kept.list) } else { &[] },
            &former,
        );
        if history.tables.is_empty() {
            return Former::default();
        }
        self.write_former(key, &history, table.range.len, context, plan).unwrap_or_else(|| {
            tracing::warn!(
                "there is no room for the former owners of {key}: its established connections do not go on by \
                 another node whose endpoint has just changed; raise --maglev-entries or --endpoint-entries"
            );
            Former::default()
        })
    }

    fn write_former(
        &mut self,
        key: &ServicePortKey,
        history: &History,
        slots: u32,
        context: &Context<'_>,
        plan: &mut Plan,
    ) -> Option<Former> {
        let none = IndexRange::default();
        let list = self.lists.place(key.ipv6, none, &history.endpoints, context.now, &mut plan.ops)?;
        let Some(tables) = self.tables.place_former(&history.tables, slots, context.now, &mut plan.ops)
        else {
            self.lists.free(key.ipv6, list, context.now);
            return None;
        };
        Some(Former { tables, slots, list, until: context.monotonic + LASTS.as_nanos() as u64 })
    }

    pub(super) fn free_former(&mut self, ipv6: bool, former: &Former, now: Instant) {
        if former.tables.len > 0 {
            self.lists.free(ipv6, former.list, now);
            self.tables.free_former(former, now);
        }
    }

    /// Returns the Service ports whose former owners are asked no longer: any plan frees them.
    pub(super) fn expired(&mut self, desired: &Desired, monotonic: u64) -> BTreeSet<ServicePortKey> {
        let mut expired = BTreeSet::new();
        if monotonic < self.forget_at {
            return expired;
        }
        self.forget_at = u64::MAX;
        for (key, Applied { former, .. }) in &self.ports {
            #[cfg(test)]
            {
                self.examined += 1;
            }
            if former.is_valid(monotonic) {
                self.forget_at = self.forget_at.min(former.until);
            } else if former.tables.len > 0 && desired.ports.contains_key(key) {
                expired.insert(key.clone());
            }
        }
        expired
    }
}
