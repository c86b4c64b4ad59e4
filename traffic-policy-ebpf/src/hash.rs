//! The flow hash, which chooses endpoints and first source ports.

use crate::abi::{Address, Tuple};

const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;

/// The seed of [`tuple()`] for Maglev tables, which all nodes have in common: docs/maglev.md.
pub const MAGLEV_SEED: u64 = 0x6d61_676c_6576_0001;

#[inline(always)]
const fn mix(h: u64, word: u64) -> u64 {
    let h = (h ^ word).wrapping_mul(MULTIPLIER);
    h ^ (h >> 32)
}

/// Hashes a tuple. With a secret `seed` no client can aim at one endpoint.
#[inline(always)]
pub fn tuple<A: Address>(t: &Tuple<A>, seed: u64) -> u64 {
    let h = mix(seed, t.source.mixed());
    let ports = t.ports.wire() as u64;
    let h = mix(h, t.destination.mixed() ^ (ports << 32 | t.protocol as u64));
    mix(h, ports)
}

/// Hashes an address and a word.
#[inline(always)]
pub fn endpoint<A: Address>(a: A, word: u32) -> u64 {
    mix(a.mixed(), word as u64)
}

/// Maps a hash to a number below `len`, without division; 0 if `len` is 0.
#[inline(always)]
pub const fn pick(hash: u64, len: u32) -> u32 {
    (((hash & 0xffff_ffff) * len as u64) >> 32) as u32
}

/// Computes a check word for an address and a word, by which a reader that loads them one after the
/// other can tell whether they were written together.
#[inline(always)]
pub fn check<A: Address>(a: A, word: u32) -> u32 {
    // For IPv4 the multiplication maps no two pairs to the same product.
    mix((word as u64) << 32, a.mixed()) as u32
}

/// Hashes an address, for bit arrays: its highest bits are the best mixed.
#[inline(always)]
pub fn address<A: Address>(a: A) -> u64 {
    a.mixed().wrapping_mul(MULTIPLIER)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{Address4, Ports};

    /// Consecutive source ports of a client must spread evenly: 100,000 flows over 7 endpoints,
    /// each within 3 % of its share.
    #[test]
    fn consecutive_ports_spread_evenly() {
        for seed in [0, 1, 0xdead_beef_0bad_cafe] {
            let mut share = [0u32; 7];
            for i in 0..100_000u32 {
                let port = (i % 50_000 + 1024) as u16;
                let client = Address4::from_octets((0xc000_0200 + i / 50_000).to_be_bytes());
                let t = Tuple {
                    source: client,
                    destination: Address4::from_wire(7),
                    ports: Ports::from_host(port, 80),
                    protocol: 6,
                };
                share[pick(tuple(&t, seed), 7) as usize] += 1;
            }
            for s in share {
                assert!((13_857..=14_714).contains(&s), "{share:?} with seed {seed}");
            }
        }
    }

    #[test]
    fn pick_stays_below() {
        assert_eq!(pick(u64::MAX, 0), 0);
        assert_eq!(pick(u64::MAX, 5), 4);
        assert_eq!(pick(0, 5), 0);
    }
}
