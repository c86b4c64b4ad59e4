//! The token buckets of the answers that the packet path makes itself: ICMP errors and RSTs.

use anyhow::Result;
use aya::maps::PerCpuValues;
use traffic_policy_ebpf::abi::RejectBucket;

use super::Harness;

impl Harness {
    /// Gives every CPU `tokens` answers to make; more are added with time.
    pub fn fill_buckets(&mut self, tokens: u32) -> Result<()> {
        let filled = self.now();
        let buckets =
            vec![RejectBucket { tokens, filled }; aya::util::nr_cpus().map_err(|(_, error)| error)?];
        // A bucket that was last filled long ago is full.
        let buckets: Vec<_> = if tokens == 0 {
            buckets
                .into_iter()
                .map(|b| RejectBucket { filled: b.filled.wrapping_sub(1 << 20), ..b })
                .collect()
        } else {
            buckets
        };
        Ok(self.buckets.set(0, PerCpuValues::try_from(buckets)?, 0)?)
    }

    /// Empties the bucket of every CPU, as after the last permitted answer.
    pub fn empty_buckets(&mut self) {
        // SAFETY: a field of the mapped element.
        self.tables.config.store(|config| unsafe { &raw mut (*config).answers_per_jiffy }, 0);
        self.clear_buckets().unwrap_or_else(|error| panic!("emptying the buckets: {error:#}"));
    }

    fn clear_buckets(&mut self) -> Result<()> {
        let buckets = vec![RejectBucket::default(); aya::util::nr_cpus().map_err(|(_, error)| error)?];
        Ok(self.buckets.set(0, PerCpuValues::try_from(buckets)?, 0)?)
    }
}
