//! The SNAT port range: source ports towards endpoints of other nodes that are free, and the map
//! `tp_snat_ports` that lists them.

use std::{collections::BTreeSet, fs, ops::RangeInclusive, str::FromStr};

use anyhow::{Context, Result, bail};

use crate::{
    dataplane::{
        Dataplane,
        maps::{
            Maps,
            mmap::{config, snat_port},
            prefilter::{self, Array},
        },
    },
    node::bound_ports,
};

/// The least number of ports: with fewer, many clients of one endpoint compete for them.
pub const LEAST: usize = 4096;

/// A list of port ranges, in the format of `--snat-ports`: `1024-29999,40000-65535`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortRanges(pub Vec<RangeInclusive<u16>>);

impl FromStr for PortRanges {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ranges = text.split(',').map(|part| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let parse = |number: &str| {
                number.trim().parse::<u16>().ok().filter(|port| *port > 0).ok_or_else(|| {
                    format!("`{part}` is not a range of ports: write FIRST-LAST with numbers from 1 to 65535")
                })
            };
            let (first, last) = (parse(first)?, parse(last)?);
            if first > last {
                return Err(format!("`{part}` ends before it begins"));
            }
            Ok(first..=last)
        });
        Ok(Self(ranges.collect::<Result<_, _>>()?))
    }
}

impl PortRanges {
    pub fn contains(&self, port: u16) -> bool {
        self.0.iter().any(|range| range.contains(&port))
    }
}

/// The SNAT port range as the flags describe it, before what the node uses is left out.
#[derive(Clone, Debug)]
pub struct SnatPortRange {
    /// The value of `--snat-ports`.
    pub ranges: PortRanges,
    /// The value of `--node-ports`, which are destinations.
    pub node_ports: PortRanges,
    /// The ports on which the agent itself is about to listen: with them the first choice is the
    /// one that later looks at the node's sockets make.
    pub own: Vec<u16>,
}

impl Default for SnatPortRange {
    fn default() -> Self {
        Self {
            ranges: PortRanges(vec![1024..=65_535]),
            node_ports: PortRanges(vec![30_000..=32_767]),
            own: Vec::new(),
        }
    }
}

const LOCAL_RANGE: &str = "/proc/sys/net/ipv4/ip_local_port_range";
const RESERVED: &str = "/proc/sys/net/ipv4/ip_local_reserved_ports";

impl SnatPortRange {
    /// Returns the ports that may be used now: those that are neither node ports, nor allocated by
    /// the kernel to its own connections, nor held by a socket of this node, nor the agent's own
    /// ones, on which it may not listen yet.
    ///
    /// # Errors
    /// Fewer than [`LEAST`] are left, or the kernel's range or its sockets cannot be read.
    pub fn ports(&self) -> Result<Vec<u16>> {
        let ephemeral = ephemeral()?;
        let ports = self.free(&ephemeral, &bound_ports()?);
        if ports.len() < LEAST {
            bail!(
                "only {} ports are left as sources towards endpoints of other nodes, {LEAST} are needed: make net.ipv4.ip_local_port_range (now {} to {}) smaller, or --snat-ports larger",
                ports.len(),
                ephemeral.start(),
                ephemeral.end()
            );
        }
        Ok(ports)
    }

    /// Returns the ports of the ranges that are neither node ports, nor `ephemeral`, nor `bound`,
    /// nor the agent's own.
    pub fn free(&self, ephemeral: &RangeInclusive<u16>, bound: &BTreeSet<u16>) -> Vec<u16> {
        (1..=u16::MAX)
            .filter(|port| {
                self.ranges.contains(*port)
                    && !self.node_ports.contains(*port)
                    && !ephemeral.contains(port)
                    && !bound.contains(port)
                    && !self.own.contains(port)
            })
            .collect()
    }
}

/// Returns the ports that the kernel allocates to its own connections,
/// net.ipv4.ip_local_port_range.
pub fn ephemeral() -> Result<RangeInclusive<u16>> {
    let text = fs::read_to_string(LOCAL_RANGE).with_context(|| format!("{LOCAL_RANGE} cannot be read"))?;
    local_range(&text).with_context(|| format!("{LOCAL_RANGE} is not understood: `{text}`"))
}

/// Returns the ephemeral ports that the kernel does not allocate, net.ipv4.ip_local_reserved_ports.
pub fn reserved() -> Vec<RangeInclusive<u16>> {
    fs::read_to_string(RESERVED).map(|text| ranges(&text)).unwrap_or_default()
}

/// Parses `8080,9000-9010`.
pub fn ranges(text: &str) -> Vec<RangeInclusive<u16>> {
    let parts = text.trim().split(',').filter_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok()?)
    });
    parts.collect()
}

fn local_range(text: &str) -> Option<RangeInclusive<u16>> {
    let mut numbers = text.split_whitespace().map(str::parse);
    Some(numbers.next()?.ok()?..=numbers.next()?.ok()?)
}

/// Returns the ports to use from now on, if they differ from `held`: the ports in use stay as long
/// as none of them has been taken in the meantime and they are not much fewer than possible, so
/// that a restart without a change writes nothing.
fn choose(held: &[u16], free: Vec<u16>) -> Option<Vec<u16>> {
    let allowed: BTreeSet<u16> = free.iter().copied().collect();
    let fits = held.iter().all(|port| allowed.contains(port));
    (held.is_empty() || !fits || held.len() * 10 < free.len() * 9).then_some(free)
}

/// The ports that the packet path uses as sources towards endpoints of other nodes.
pub trait SnatPorts {
    /// Returns the settings of the ports: finding the free ones takes a while.
    fn snat_port_range(&self) -> SnatPortRange;

    /// Uses `free` as source ports, unless the ports in use suffice.
    fn use_snat_ports(&mut self, free: Vec<u16>);
}

impl SnatPorts for Dataplane {
    fn snat_port_range(&self) -> SnatPortRange {
        self.config.snat_ports.clone()
    }

    fn use_snat_ports(&mut self, free: Vec<u16>) {
        let Maps { snat_ports, config, prefilter, .. } = &mut self.maps;
        let len = config.load(config::snat_port_count);
        let held: Vec<u16> =
            (0..=u16::MAX).take(len as usize).map(|place| snat_ports.load(snat_port(place))).collect();
        let Some(ports) = choose(&held, free) else { return };
        // The bits are written first, and none is removed: flows that use a port outlive its place
        // in the map.
        prefilter::add(prefilter, Array::SnatPorts, ports.iter().copied().map(u32::from));
        for (place, port) in (0..).zip(&ports) {
            snat_ports.store(snat_port(place), *port);
        }
        config.store(config::snat_port_count, ports.len() as u32);
        tracing::info!(ports = ports.len(), "source ports towards endpoints of other nodes");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_parsed() {
        assert_eq!("1024-2000,3000".parse::<PortRanges>().unwrap().0, [1024..=2000, 3000..=3000]);
        for bad in ["", "0-5", "70000", "5-1", "a-b", "1-2-3"] {
            assert!(bad.parse::<PortRanges>().is_err(), "{bad}");
        }
    }

    /// A listener that is opened after the first choice takes no port from it later.
    #[test]
    fn what_the_agent_is_about_to_listen_on_is_left_out_from_the_start() {
        let range = SnatPortRange {
            ranges: PortRanges(vec![10_249..=10_252]),
            own: vec![10_249],
            ..SnatPortRange::default()
        };
        let free = |bound: &[u16]| range.free(&(32_768..=60_999), &bound.iter().copied().collect());
        assert_eq!(free(&[10_251]), [10_250, 10_252]);
        assert_eq!(free(&[10_249, 10_251]), free(&[10_251]));
    }

    #[test]
    fn the_kernels_range_is_understood() {
        assert_eq!(local_range("32768\t60999\n"), Some(32_768..=60_999));
    }

    #[test]
    fn ports_in_use_stay() {
        assert_eq!(choose(&[], vec![1, 2]), Some(vec![1, 2]));
        assert_eq!(choose(&[1, 2], vec![1, 2]), None);
        assert_eq!(choose(&[1, 2], vec![2, 3]), Some(vec![2, 3]), "port 1 is taken");
        let free: Vec<u16> = (1..=100).collect();
        assert_eq!(choose(&free[..95], free.clone()), None);
        assert_eq!(choose(&free[..50], free.clone()), Some(free));
    }
}
