//! Lint of an exposition: bad style and sums that do not add up, although a scraper accepts them.

use std::collections::BTreeMap;

use super::{Family, Kind, Labels, Sample};

/// Units, each with its base unit.
const UNITS: [(&str, &str); 16] = [
    ("milliseconds", "seconds"),
    ("microseconds", "seconds"),
    ("nanoseconds", "seconds"),
    ("minutes", "seconds"),
    ("hours", "seconds"),
    ("days", "seconds"),
    ("weeks", "seconds"),
    ("kilobytes", "bytes"),
    ("megabytes", "bytes"),
    ("gigabytes", "bytes"),
    ("kibibytes", "bytes"),
    ("mebibytes", "bytes"),
    ("gibibytes", "bytes"),
    ("bits", "bytes"),
    ("percent", "ratio"),
    ("percentage", "ratio"),
];
const ABBREVIATIONS: [&str; 18] =
    ["s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d", "k", "hz", "v", "pct"];
const TYPES: [&str; 5] = ["counter", "gauge", "histogram", "summary", "untyped"];

pub(super) fn complaints(family: &Family) -> Vec<String> {
    let name = &family.name;
    let mut said = Vec::new();
    let mut say = |what: String| said.push(format!("{name}: {what}"));
    if family.help.as_deref().is_none_or(str::is_empty) {
        say("no help text".to_owned());
    }
    if family.kind.is_none() {
        say("no type".to_owned());
    }
    if family.samples.is_empty() {
        say("no samples".to_owned());
    }
    let total = name.ends_with("_total");
    match family.kind {
        Some(Kind::Counter) if !total => say("a counter should end in _total".to_owned()),
        Some(Kind::Gauge | Kind::Histogram | Kind::Summary) if total => {
            say("only a counter should end in _total".to_owned());
        }
        _ => {}
    }
    if name.contains(':') {
        say("colons are for recording rules".to_owned());
    }
    if name.chars().any(char::is_uppercase) {
        say("should be in snake_case".to_owned());
    }
    for word in name.split('_') {
        if TYPES.contains(&word) {
            say(format!("should not name the type {word}"));
        }
        if ABBREVIATIONS.contains(&word) {
            say(format!("{word} abbreviates a unit"));
        }
        if let Some((_, base)) = UNITS.iter().find(|(unit, _)| *unit == word) {
            say(format!("use {base} instead of {word}"));
        }
    }
    match family.kind {
        Some(Kind::Histogram) => histogram(family, &mut say),
        Some(Kind::Summary) => say("summaries are not looked at".to_owned()),
        _ => plain(family, &mut say),
    }
    said
}

fn plain(family: &Family, say: &mut impl FnMut(String)) {
    if let Some(suffix) = ["_bucket", "_sum", "_count"].iter().find(|suffix| family.name.ends_with(**suffix))
    {
        say(format!("only a histogram should have {suffix}"));
    }
    for sample in &family.samples {
        if sample.labels.contains_key("le") || sample.labels.contains_key("quantile") {
            say("only a histogram should have le, only a summary quantile".to_owned());
        }
        if family.kind == Some(Kind::Counter) && (sample.value.is_nan() || sample.value < 0.0) {
            say(format!("a counter at {}", sample.value));
        }
        for label in sample.labels.keys() {
            if label.chars().any(char::is_uppercase) {
                say(format!("label {label} should be in snake_case"));
            }
        }
    }
}

/// Checks, for each set of labels, that bounds ascend, counts grow, and the last bucket has the
/// count of all.
fn histogram(family: &Family, say: &mut impl FnMut(String)) {
    #[derive(Default)]
    struct Parts {
        buckets: Vec<(f64, f64)>,
        sum: Option<f64>,
        count: Option<f64>,
    }
    let mut parts: BTreeMap<Labels, Parts> = BTreeMap::new();
    for Sample { name, labels, value } in &family.samples {
        let mut labels = labels.clone();
        let bound = labels.remove("le");
        let parts = parts.entry(labels).or_default();
        match (name.strip_prefix(family.name.as_str()), bound.map(|bound| bound.parse())) {
            (Some("_bucket"), Some(Ok(bound))) => parts.buckets.push((bound, *value)),
            (Some("_sum"), None) => parts.sum = Some(*value),
            (Some("_count"), None) => parts.count = Some(*value),
            _ => say(format!("{name} is no part of a histogram, or its le no number")),
        }
    }
    for (labels, Parts { buckets, sum, count }) in parts {
        if !buckets.is_sorted_by(|(bound, count), (next, more)| bound < next && count <= more) {
            say(format!("the buckets of {labels:?} do not ascend"));
        }
        if sum.is_none() {
            say(format!("no sum of {labels:?}"));
        }
        let last = buckets.last().filter(|(bound, _)| *bound == f64::INFINITY).map(|(_, count)| *count);
        if last.is_none() || last != count {
            say(format!("the bucket +Inf of {labels:?} is not the count"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Exposition;

    #[test]
    fn complains_of_bad_style() {
        for (text, what) in [
            ("# TYPE a gauge\na 1\n", "no help"),
            ("# HELP a A.\na 1\n", "no type"),
            ("# HELP a A.\n# TYPE a counter\na 1\n", "end in _total"),
            ("# HELP a_total A.\n# TYPE a_total gauge\na_total 1\n", "end in _total"),
            ("# HELP a_total A.\n# TYPE a_total counter\na_total -1\n", "counter at -1"),
            ("# HELP aB A.\n# TYPE aB gauge\naB 1\n", "snake_case"),
            ("# HELP a:b A.\n# TYPE a:b gauge\na:b 1\n", "colons"),
            ("# HELP a_ms A.\n# TYPE a_ms gauge\na_ms 1\n", "abbreviates"),
            ("# HELP a_minutes A.\n# TYPE a_minutes gauge\na_minutes 1\n", "use seconds"),
            ("# HELP a_gauge A.\n# TYPE a_gauge gauge\na_gauge 1\n", "name the type"),
            ("# HELP a_count A.\n# TYPE a_count gauge\na_count 1\n", "only a histogram"),
            ("# HELP a A.\n# TYPE a gauge\na{le=\"1\"} 1\n", "only a histogram"),
        ] {
            let said = Exposition::parse(text).expect(text).complaints();
            assert!(said.iter().any(|said| said.contains(what)), "{text}: {said:?}");
        }
        let good = "# HELP a_total A.\n# TYPE a_total untyped\na_total 1\n";
        assert!(Exposition::parse(good).expect(good).complaints().is_empty());
    }

    #[test]
    fn complains_of_histograms_that_do_not_add_up() {
        let good = [
            "a_bucket{le=\"0.5\"} 1",
            "a_bucket{le=\"1\"} 3",
            "a_bucket{le=\"+Inf\"} 4",
            "a_sum 5",
            "a_count 4",
        ];
        let complaints = |lines: &[&str]| {
            let text = format!("# HELP a A.\n# TYPE a histogram\n{}\n", lines.join("\n"));
            Exposition::parse(&text).expect(&text).complaints()
        };
        assert!(complaints(&good).is_empty(), "{:?}", complaints(&good));
        for (place, line, what) in [
            (0, "a_bucket{le=\"0.5\"} 4", "do not ascend"),
            (0, "a_bucket{le=\"2\"} 1", "do not ascend"),
            (2, "a_bucket{le=\"2\"} 4", "is not the count"),
            (2, "a_bucket{le=\"+Inf\"} 5", "is not the count"),
            (4, "a_count 3", "is not the count"),
            (3, "a_sum{x=\"1\"} 5", "no sum"),
            (0, "a_bucket{le=\"x\"} 1", "no number"),
        ] {
            let mut lines = good;
            lines[place] = line;
            let said = complaints(&lines);
            assert!(said.iter().any(|said| said.contains(what)), "{line}: {said:?}");
        }
    }
}
