//! Counts of observations by size.

/// Observations by upper bounds.
#[derive(Clone, Debug)]
pub struct Histogram {
    /// Upper bounds, ascending.
    bounds: Vec<f64>,
    /// Counts, one more than bounds: the last counts everything above all of them.
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    /// Makes a histogram. `bounds` ascend; each belongs to its bucket.
    pub fn new(bounds: Vec<f64>) -> Self {
        debug_assert!(bounds.is_sorted_by(|a, b| a < b));
        let counts = vec![0; bounds.len() + 1];
        Self { bounds, counts, sum: 0.0 }
    }

    pub fn observe(&mut self, value: f64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.counts[bucket] += 1;
        self.sum += value;
    }

    pub fn sum(&self) -> f64 {
        self.sum
    }

    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns each bound, and last `None`, with the number of observations up to it.
    pub fn cumulative(&self) -> impl Iterator<Item = (Option<f64>, u64)> {
        let bounds = self.bounds.iter().copied().map(Some).chain([None]);
        bounds.zip(self.counts.iter().scan(0, |sum, count| {
            *sum += count;
            Some(*sum)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_belongs_to_its_bucket() {
        let mut histogram = Histogram::new(vec![1.0, 2.0, 4.0]);
        for value in [0.0, 1.0, 1.5, 4.0, 4.5] {
            histogram.observe(value);
        }
        let cumulative: Vec<_> = histogram.cumulative().collect();
        assert_eq!(cumulative, [(Some(1.0), 2), (Some(2.0), 3), (Some(4.0), 4), (None, 5)]);
        assert_eq!(histogram.count(), 5);
        assert!((histogram.sum() - 11.0).abs() < f64::EPSILON);
    }
}
