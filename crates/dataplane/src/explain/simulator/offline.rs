//! A simulator without a device: the maps are the copy's own, written according to the manifests.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::Result;
use traffic_policy_cluster::model::{Changes, Desired, maglev::TableSize};
use traffic_policy_ebpf::abi::{DeviceInfo, HOP_XDP, Hop, RuntimeConfig};

use super::{Entrance, PacketHook, Simulator};
use crate::dataplane::{
    bpf::loader::Routes,
    maps::{
        Maps,
        keys::SetAddresses,
        mmap::{routes, snat_port},
        prefilter::{self, Array},
    },
    privileges::check_privileges,
    sync::{
        apply,
        op::Held,
        plan::{Context, Planner},
    },
    tracing_copy::TracingCopy,
};

/// The loopback device, which every network namespace has: packets seem to arrive on it.
const IFINDEX: u32 = 1;
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
/// The assumed next hop, see `hop::ASSUMED_HOP` of the packet path.
const ASSUMED_HOP: u32 = 1;
/// The source ports towards endpoints of other nodes: a range without node ports.
const SNAT_PORTS: std::ops::RangeInclusive<u16> = 61_000..=65_535;

impl Simulator {
    /// Creates the packet path of a hypothetical node. `primary`: its primary address of each
    /// family, if it has one. The next hop is not evaluated: every destination on another node is
    /// assumed to be reachable.
    pub fn offline(
        desired: &Desired,
        addresses: &BTreeSet<IpAddr>,
        primary: &[IpAddr],
        table_size: TableSize,
    ) -> Result<Self> {
        check_privileges()?;
        let mut copy = TracingCopy::load(None, &|_| false, Routes::Assumed)?;
        set_up(&mut copy.maps, primary)?;
        write(&mut copy.maps, desired, addresses, table_size)?;
        let entrances = vec![Entrance { ifindex: IFINDEX, mac: MAC, hook: PacketHook::Xdp }];
        Ok(Self { copy, entrances, as_cluster: false })
    }
}

fn set_up(maps: &mut Maps, primary: &[IpAddr]) -> Result<()> {
    let config = RuntimeConfig {
        snat_port_count: SNAT_PORTS.len() as u32,
        seed: 0x7472_6166_6669_6321,
        answers_per_jiffy: 1,
        ..RuntimeConfig::default()
    };
    maps.config.write(config);
    maps.prefilter.store(routes::route, 1);
    maps.prefilter.store(routes::hop_epoch, 1);
    maps.prefilter.store(routes::hop_max_age, u32::MAX);
    for (place, port) in (0..).zip(SNAT_PORTS) {
        maps.snat_ports.store(snat_port(place), port);
    }
    prefilter::set_primary(&mut maps.prefilter, primary);
    prefilter::add(&mut maps.prefilter, Array::SnatPorts, SNAT_PORTS.map(u32::from));
    let mut device = DeviceInfo { mac: MAC, flags: HOP_XDP, mtu: 0xffff, ..DeviceInfo::default() };
    device.set_addresses(primary.iter().copied());
    maps.devices.insert(IFINDEX, device, 0)?;
    let hop = Hop { ifindex: IFINDEX, mtu: 0xffff, epoch: 1, flags: HOP_XDP, ..Hop::default() };
    maps.hops.set(ASSUMED_HOP, hop, 0)?;
    Ok(())
}

fn write(
    maps: &mut Maps,
    desired: &Desired,
    addresses: &BTreeSet<IpAddr>,
    table_size: TableSize,
) -> Result<()> {
    let context = Context {
        tables: &|range| apply::table(maps, range),
        addresses,
        drain: Duration::ZERO,
        monotonic: 0,
        now: Instant::now(),
        adopting: false,
        table_size,
        sctp: true,
    };
    let mut planner = Planner::new(Held::default(), maps.room.plan_capacity());
    let plan = planner.plan(desired, &Changes::default(), &context);
    apply::needed(&plan.ops, planner.service_cidrs()).add_to(&mut maps.prefilter);
    for op in &plan.ops {
        apply::write(maps, op)?;
    }
    Ok(())
}
