//! The MTUs of routes, in the maps `tp_route_mtus4` and `tp_route_mtus6`.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use aya::{
    Pod,
    maps::{
        MapData,
        lpm_trie::{Key, LpmTrie},
    },
};
use ipnet::IpNet;
use traffic_policy_ebpf::abi::RoutePrefix;

use super::maps::{
    Maps,
    keys::{from_words, to_words},
    mmap::routes,
};
use crate::node::RouteMtus;

/// Writes the MTUs; returns whether the maps held others.
pub fn write(maps: &mut Maps, wanted: &RouteMtus) -> Result<bool> {
    let (mut four, mut six) = (wanted.0.clone(), wanted.0.clone());
    four.retain(|prefix, _| prefix.addr().is_ipv4());
    six.retain(|prefix, _| prefix.addr().is_ipv6());
    let families = u32::from(!four.is_empty()) | u32::from(!six.is_empty()) << 1;
    let mut differed = equal(&mut maps.v4.route_mtus, &four, false)?;
    differed |= equal(&mut maps.v6.route_mtus, &six, true)?;
    differed |= maps.prefilter.store(routes::route_mtus, families);
    Ok(differed)
}

fn equal<const W: usize>(
    map: &mut LpmTrie<MapData, RoutePrefix<W>, u32>,
    wanted: &BTreeMap<IpNet, u32>,
    ipv6: bool,
) -> Result<bool>
where
    RoutePrefix<W>: Pod,
{
    let mut held = BTreeMap::new();
    for entry in map.iter() {
        let (key, mtu) = entry.context("reading the MTUs of routes failed")?;
        let address = from_words(&{ key.data().address }, ipv6);
        held.insert(IpNet::new(address, u8::try_from(key.prefix_len())?)?, mtu);
    }
    // Entries are removed first, which makes room for new ones.
    for prefix in held.keys().filter(|prefix| !wanted.contains_key(prefix)) {
        map.remove(&key(prefix)).context("forgetting the MTU of a route failed")?;
    }
    for (prefix, mtu) in wanted.iter().filter(|(prefix, mtu)| held.get(prefix) != Some(mtu)) {
        map.insert(&key(prefix), *mtu, 0).context("writing the MTU of a route failed")?;
    }
    Ok(held != *wanted)
}

fn key<const W: usize>(prefix: &IpNet) -> Key<RoutePrefix<W>> {
    Key::new(u32::from(prefix.prefix_len()), RoutePrefix { address: to_words(prefix.network()) })
}
