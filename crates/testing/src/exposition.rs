//! The Prometheus text format, parsed as strictly as a scraper may, and checked by the rules of
//! `promtool check metrics`
//! (<https://github.com/prometheus/client_golang/tree/main/prometheus/testutil/promlint>).

mod lint;

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};

/// Label values by name.
pub type Labels = BTreeMap<String, String>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Counter,
    Gauge,
    Histogram,
    Summary,
    Untyped,
}

/// One line of the exposition. For a histogram, a line is a bucket, the sum or the count.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    pub name: String,
    pub labels: Labels,
    pub value: f64,
}

/// All samples of one name, in order.
#[derive(Clone, Debug)]
pub struct Family {
    pub name: String,
    pub help: Option<String>,
    pub kind: Option<Kind>,
    pub samples: Vec<Sample>,
}

/// A whole scrape.
#[derive(Clone, Debug)]
pub struct Exposition {
    pub families: Vec<Family>,
}

impl Exposition {
    /// Parses a scrape. Whatever a scraper would refuse is an error: invalid names, wrong escapes,
    /// a header that is repeated or follows its samples, a family in several pieces, a repeated
    /// series.
    pub fn parse(text: &str) -> Result<Self> {
        ensure!(text.is_empty() || text.ends_with('\n'), "the last line has no end");
        let mut exposition = Self { families: Vec::new() };
        for (number, line) in text.lines().enumerate() {
            exposition.line(line).with_context(|| format!("line {}: {line}", number + 1))?;
        }
        Ok(exposition)
    }

    fn line(&mut self, line: &str) -> Result<()> {
        let Some(header) = line.strip_prefix("# ") else {
            ensure!(!line.is_empty(), "is empty");
            return self.sample(line);
        };
        let (word, rest) = header.split_once(' ').context("a header of one word")?;
        let (name, text) = rest.split_once(' ').context("a header without a text")?;
        ensure!(is_name(name, true), "{name:?} is no name");
        let family = self.family(name)?;
        ensure!(family.samples.is_empty(), "the header stands behind samples");
        match word {
            "HELP" => {
                ensure!(family.help.is_none(), "HELP twice");
                family.help = Some(unescape(text, false)?);
            }
            "TYPE" => {
                ensure!(family.kind.is_none(), "TYPE twice");
                family.kind = Some(match text {
                    "counter" => Kind::Counter,
                    "gauge" => Kind::Gauge,
                    "histogram" => Kind::Histogram,
                    "summary" => Kind::Summary,
                    "untyped" => Kind::Untyped,
                    other => bail!("{other:?} is no type"),
                });
            }
            other => bail!("{other:?} is no header"),
        }
        Ok(())
    }

    /// The family to which a header or sample belongs: the last one, or a new one.
    fn family(&mut self, name: &str) -> Result<&mut Family> {
        let place = self.families.iter().position(|family| family.name == name);
        match place {
            Some(place) => ensure!(place + 1 == self.families.len(), "{name} is in pieces"),
            None => self.families.push(Family {
                name: name.to_owned(),
                help: None,
                kind: None,
                samples: Vec::new(),
            }),
        }
        self.families.last_mut().context("no family")
    }

    fn sample(&mut self, line: &str) -> Result<()> {
        let sample = read_sample(line)?;
        let of_histogram = self.families.last().filter(|last| {
            let suffix = sample.name.strip_prefix(last.name.as_str());
            last.kind == Some(Kind::Histogram)
                && suffix.is_some_and(|suffix| ["_bucket", "_sum", "_count"].contains(&suffix))
        });
        let name = of_histogram.map_or_else(|| sample.name.clone(), |family| family.name.clone());
        let family = self.family(&name)?;
        let same = |other: &Sample| (&other.name, &other.labels) == (&sample.name, &sample.labels);
        ensure!(!family.samples.iter().any(same), "the series was there before");
        family.samples.push(sample);
        Ok(())
    }

    /// Violations of the rules of `promtool check metrics`, and histograms that do not add up,
    /// which it does not check.
    pub fn complaints(&self) -> Vec<String> {
        self.families.iter().flat_map(lint::complaints).collect()
    }

    pub fn kind(&self, family: &str) -> Option<Kind> {
        self.families.iter().find(|found| found.name == family).and_then(|found| found.kind)
    }

    /// The samples of a name that have these labels, and possibly others.
    pub fn samples(&self, name: &str, labels: &[(&str, &str)]) -> Vec<&Sample> {
        let has = |sample: &&Sample| {
            let label = |(name, value): &(&str, &str)| sample.labels.get(*name).is_some_and(|v| v == value);
            sample.name == name && labels.iter().all(label)
        };
        self.families.iter().flat_map(|family| &family.samples).filter(has).collect()
    }

    /// The value of the one sample of a name with these labels.
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> Result<f64> {
        match self.samples(name, labels)[..] {
            [sample] => Ok(sample.value),
            ref other => bail!("{} samples of {name} {labels:?}", other.len()),
        }
    }
}

fn read_sample(line: &str) -> Result<Sample> {
    let end = line.find(['{', ' ']).context("a name alone")?;
    let (name, mut rest) = line.split_at(end);
    ensure!(is_name(name, true), "{name:?} is no name");
    let mut labels = Labels::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        while !rest.starts_with('}') {
            let (name, behind) = rest.split_once("=\"").context("a label without a value")?;
            ensure!(is_name(name, false), "{name:?} is no name of a label");
            let end = closing_quote(behind).context("a label's value does not end")?;
            let value = unescape(&behind[..end], true)?;
            ensure!(labels.insert(name.to_owned(), value).is_none(), "label {name} twice");
            rest = &behind[end + 1..];
            rest = rest.strip_prefix(',').unwrap_or(rest);
        }
        rest = &rest[1..];
    }
    let value = rest.strip_prefix(' ').context("no space before the value")?;
    Ok(Sample { name: name.to_owned(), labels, value: value.parse().context("the value is no number")? })
}

/// The position of the quote that ends a text.
fn closing_quote(text: &str) -> Option<usize> {
    let mut escaped = false;
    text.char_indices().find_map(|(place, character)| {
        let end = character == '"' && !escaped;
        escaped = character == '\\' && !escaped;
        end.then_some(place)
    })
}

fn unescape(text: &str, quoted: bool) -> Result<String> {
    let mut plain = String::new();
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match character {
            '\\' => plain.push(match characters.next() {
                Some('\\') => '\\',
                Some('n') => '\n',
                Some('"') if quoted => '"',
                other => bail!("\\{other:?} is no escape"),
            }),
            other => plain.push(other),
        }
    }
    Ok(plain)
}

/// Whether a name is valid for a metric or, with `metric` unset, for a label: a label may have no
/// colon and must not begin with two underscores.
fn is_name(name: &str, metric: bool) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || c == '_' || (metric && c == ':');
    let start = |c: char| good(c) && !c.is_ascii_digit();
    name.starts_with(start) && name.chars().all(good) && (metric || !name.starts_with("__"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_names_labels_and_values() {
        let text = "# HELP a_total An \\\\ \\n \"a\".\n# TYPE a_total counter\na_total{x=\"1,}\\\"\\\\\",y=\"\"} 2.5\na_total 3e2\n";
        let read = Exposition::parse(text).expect("a good text");
        assert_eq!(read.families[0].help.as_deref(), Some("An \\ \n \"a\"."));
        assert_eq!(read.kind("a_total"), Some(Kind::Counter));
        assert!(
            (read.value("a_total", &[("x", "1,}\"\\"), ("y", "")]).expect("it is there") - 2.5).abs() < 1e-9
        );
        assert_eq!(read.samples("a_total", &[]).len(), 2);
        assert!(read.complaints().is_empty());
    }

    #[test]
    fn refuses_what_a_scraper_refuses() {
        for (text, what) in [
            ("a 1", "no end"),
            ("a 1\n# TYPE a gauge\n", "behind samples"),
            ("# TYPE a gauge\n# TYPE a gauge\n", "twice"),
            ("# HELP a A.\n# HELP a A.\n", "twice"),
            ("# TYPE a meter\n", "no type"),
            ("a 1\nb 1\na{x=\"1\"} 1\n", "in pieces"),
            ("a{x=\"1\"} 1\na{x=\"1\"} 2\n", "there before"),
            ("a{x=\"1\",x=\"1\"} 1\n", "label x twice"),
            ("a-b 1\n", "no name"),
            ("0a 1\n", "no name"),
            ("a{x:y=\"1\"} 1\n", "no name of a label"),
            ("a{__x=\"1\"} 1\n", "no name of a label"),
            ("a{x=\"1} 1\n", "does not end"),
            ("a{x=\"\\t\"} 1\n", "no escape"),
            ("a one\n", "no number"),
            ("a\n", "a name alone"),
            ("\n", "is empty"),
        ] {
            let error = Exposition::parse(text).expect_err(text);
            assert!(format!("{error:#}").contains(what), "{text:?}: {error:#}");
        }
    }
}
