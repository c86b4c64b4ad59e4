//! A trial without a device: the maps are the copy's own, written from what the manifests want.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::Result;
use traffic_policy_ebpf::abi::{Device, HOP_XDP, Hop, State};

use super::{Entrance, Kernel, PacketHook, Routes, Trial, load_copy};
use crate::{
    dataplane::{
        PLAN_SIZES, check_privileges,
        filter::{self, Array, Bits, Needed},
        plan::{Context, Held, Planner},
        store,
        tables::SetAddresses,
        words::pool_port,
    },
    model::Desired,
};

/// The loopback device, which every network namespace has: packets seem to come by it.
const IFINDEX: u32 = 1;
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
/// See `hop::ASSUMED_HOP` of the packet path.
const ASSUMED_HOP: u32 = 1;
/// Source ports towards endpoints of other nodes: some that no node port has.
const POOL: std::ops::RangeInclusive<u16> = 61_000..=65_535;

impl Trial {
    /// The packet path of a node that is not there. `primary`: its address of each family towards others, where it has
    /// one. The next hop is not judged: whatever is not on this node is reached.
    ///
    /// # Errors
    /// Missing privileges; the kernel refuses.
    pub fn offline(desired: &Desired, addresses: &BTreeSet<IpAddr>, primary: &[IpAddr]) -> Result<Self> {
        check_privileges()?;
        let kernel = Kernel::running()?;
        let mut trial = Self::load(load_copy(None, &|_| false, Routes::Assumed, &kernel)?)?;
        trial.entrances = vec![Entrance { ifindex: IFINDEX, mac: MAC, hook: PacketHook::Xdp }];
        trial.set_up(primary)?;
        trial.write(desired, addresses)?;
        Ok(trial)
    }

    fn set_up(&mut self, primary: &[IpAddr]) -> Result<()> {
        let state = State {
            route: 1,
            hop_epoch: 1,
            hop_max_age: u32::MAX,
            pool_len: POOL.len() as u32,
            unconfirmed_limit: [u32::MAX; 2],
            seed: 0x7472_6166_6669_6321,
            answers_per_jiffy: 1,
            ..State::default()
        };
        // SAFETY: the element is mapped as long as the tables live, and no program runs meanwhile.
        unsafe { self.tables.state.pointer().write_volatile(state) };
        for (place, port) in (0..).zip(POOL) {
            self.tables.pool.store(pool_port(place), port);
        }
        filter::add(&mut self.tables.filter, Array::Pool, &POOL.collect::<Bits>());
        let mut device = Device { mac: MAC, flags: HOP_XDP, mtu: 0xffff, ..Device::default() };
        device.set_addresses(primary.iter().copied());
        self.tables.devices.insert(IFINDEX, device, 0)?;
        let hop = Hop { ifindex: IFINDEX, mtu: 0xffff, epoch: 1, flags: HOP_XDP, ..Hop::default() };
        self.tables.hops.set(ASSUMED_HOP, hop, 0)?;
        Ok(())
    }

    fn write(&mut self, desired: &Desired, addresses: &BTreeSet<IpAddr>) -> Result<()> {
        let context = Context { addresses, drain: Duration::ZERO, monotonic: 0, now: Instant::now() };
        let mut planner = Planner::new(Held::default(), PLAN_SIZES);
        let plan = planner.plan(desired, &BTreeSet::new(), &context);
        Needed::of(&plan.ops, planner.cluster_ips()).add_to(&mut self.tables.filter);
        for op in &plan.ops {
            store::write(&mut self.tables, op)?;
        }
        Ok(())
    }
}
