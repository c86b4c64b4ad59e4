//! The text format: <https://prometheus.io/docs/instrumenting/exposition_formats/>, version 0.0.4.

use std::fmt::{self, Display, Formatter, Write};

use super::histogram::Histogram;

/// `Content-Type` of the format.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Names and values of a sample's labels. No two samples of a family share them.
pub type Labels<'a> = &'a [(&'static str, &'a str)];

/// All samples of one name.
#[derive(Clone, Debug)]
pub struct Family {
    name: &'static str,
    help: &'static str,
    kind: Kind,
    /// Finished lines.
    samples: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Counter,
    Gauge,
    Histogram,
    Untyped,
}

impl Family {
    const fn new(name: &'static str, help: &'static str, kind: Kind) -> Self {
        Self { name, help, kind, samples: String::new() }
    }

    /// Makes a family that never decreases; its name ends in `_total`.
    pub const fn counter(name: &'static str, help: &'static str) -> Self {
        Self::new(name, help, Kind::Counter)
    }

    pub const fn gauge(name: &'static str, help: &'static str) -> Self {
        Self::new(name, help, Kind::Gauge)
    }

    pub const fn histogram(name: &'static str, help: &'static str) -> Self {
        Self::new(name, help, Kind::Histogram)
    }

    /// Makes a family whose name does not follow the rules of its type.
    pub const fn untyped(name: &'static str, help: &'static str) -> Self {
        Self::new(name, help, Kind::Untyped)
    }

    /// Adds a sample.
    pub fn add(&mut self, labels: Labels<'_>, value: f64) {
        debug_assert!(self.kind != Kind::Histogram, "{} has buckets", self.name);
        self.line("", labels, value);
    }

    /// Adds a sample.
    pub fn with(mut self, labels: Labels<'_>, value: f64) -> Self {
        self.add(labels, value);
        self
    }

    /// Adds the samples of a histogram.
    pub fn add_histogram(&mut self, labels: Labels<'_>, histogram: &Histogram) {
        debug_assert!(self.kind == Kind::Histogram, "{} has no buckets", self.name);
        for (bound, count) in histogram.cumulative() {
            let bound = bound.map_or_else(|| "+Inf".to_owned(), |bound| bound.to_string());
            self.line("_bucket", &[labels, &[("le", &bound)]].concat(), count as f64);
        }
        self.line("_sum", labels, histogram.sum());
        self.line("_count", labels, histogram.count() as f64);
    }

    fn line(&mut self, suffix: &str, labels: Labels<'_>, value: f64) {
        self.samples.push_str(self.name);
        self.samples.push_str(suffix);
        for (place, (name, value)) in labels.iter().enumerate() {
            self.samples.push(if place == 0 { '{' } else { ',' });
            self.samples.push_str(name);
            self.samples.push_str("=\"");
            escape(value, true, &mut self.samples);
            self.samples.push('"');
        }
        if !labels.is_empty() {
            self.samples.push('}');
        }
        // Writing into a String does not fail.
        let _ = writeln!(self.samples, " {value}");
    }
}

/// A family without samples is omitted entirely.
impl Display for Family {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if self.samples.is_empty() {
            return Ok(());
        }
        let kind = match self.kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
            Kind::Untyped => "untyped",
        };
        let Self { name, samples, .. } = self;
        let mut help = String::new();
        escape(self.help, false, &mut help);
        write!(f, "# HELP {name} {help}\n# TYPE {name} {kind}\n{samples}")
    }
}

/// Escapes a text. Label values are quoted, so that quotes in them are escaped too; help texts are
/// not.
fn escape(text: &str, quoted: bool, out: &mut String) {
    for character in text.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '"' if quoted => out.push_str("\\\""),
            other => out.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_follow_help_and_type() {
        let family = Family::counter("apples_total", "Apples.")
            .with(&[("kind", "green"), ("size", "1")], 3.0)
            .with(&[("kind", "red"), ("size", "1")], 0.5);
        let text = "# HELP apples_total Apples.\n# TYPE apples_total counter\n\
                    apples_total{kind=\"green\",size=\"1\"} 3\napples_total{kind=\"red\",size=\"1\"} 0.5\n";
        assert_eq!(family.to_string(), text);
        assert_eq!(Family::gauge("pears", "Pears.").to_string(), "");
        let large = Family::gauge("pears", "Pears.").with(&[], 1_790_000_000_123.25);
        assert!(large.to_string().ends_with("\npears 1790000000123.25\n"));
    }

    #[test]
    fn labels_and_help_are_escaped() {
        let family = Family::gauge("pears", "With \"quotes\", \\ and\nlines.").with(&[("a", "\"b\\\n")], 1.0);
        let text = "# HELP pears With \"quotes\", \\\\ and\\nlines.\n# TYPE pears gauge\n\
                    pears{a=\"\\\"b\\\\\\n\"} 1\n";
        assert_eq!(family.to_string(), text);
    }

    #[test]
    fn buckets_sum_and_count() {
        let mut histogram = Histogram::new(vec![0.5, 1.0]);
        for value in [0.25, 0.5, 4.0] {
            histogram.observe(value);
        }
        let mut family = Family::histogram("wait_seconds", "Waiting.");
        family.add_histogram(&[("a", "b")], &histogram);
        let text = "# HELP wait_seconds Waiting.\n# TYPE wait_seconds histogram\n\
                    wait_seconds_bucket{a=\"b\",le=\"0.5\"} 2\nwait_seconds_bucket{a=\"b\",le=\"1\"} 2\n\
                    wait_seconds_bucket{a=\"b\",le=\"+Inf\"} 3\nwait_seconds_sum{a=\"b\"} 4.75\n\
                    wait_seconds_count{a=\"b\"} 3\n";
        assert_eq!(family.to_string(), text);
    }
}
