//! Queries of Prometheus, as far as the alert rules about direct forwarding use them: selectors,
//! `rate`, `sum by` and `max by`, comparisons with a number, `and` and `unless` with `on`.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};

pub type Labels = BTreeMap<String, String>;

/// The value of a series with its labels; `__name__` is its metric. In place of what a range has,
/// it is its rate.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    pub labels: Labels,
    pub value: f64,
}

impl Sample {
    pub fn new(metric: &str, labels: &[(&str, &str)], value: f64) -> Self {
        let labels = [("__name__", metric)].into_iter().chain(labels.iter().copied());
        let labels = labels.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        Self { labels, value }
    }
}

/// Evaluates a query.
///
/// # Errors
/// It has something that is not known here.
pub fn evaluate(query: &str, series: &[Sample]) -> Result<Vec<Sample>> {
    let mut query = Query { words: words(query), series };
    query.words.reverse();
    let result = query.sets().with_context(|| format!("left of it: {:?}", query.words))?;
    ensure!(query.words.is_empty(), "not understood: {:?}", query.words);
    Ok(result)
}

/// Splits a query: names and numbers, texts with their quotes, and signs.
fn words(query: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut rest = query.trim_start();
    while let Some(first) = rest.chars().next() {
        let is_word = |c: char| c.is_ascii_alphanumeric() || "_:.".contains(c);
        let length = if first == '"' {
            rest[1..].find('"').map_or(rest.len(), |end| end + 2)
        } else if is_word(first) {
            rest.find(|c| !is_word(c)).unwrap_or(rest.len())
        } else {
            let double = ["==", "!=", ">=", "<=", "=~", "!~"].iter().any(|sign| rest.starts_with(sign));
            if double { 2 } else { first.len_utf8() }
        };
        words.push(rest[..length].to_owned());
        rest = rest[length..].trim_start();
    }
    words
}

struct Query<'s> {
    /// The words that are left, the next one last.
    words: Vec<String>,
    series: &'s [Sample],
}

impl Query<'_> {
    fn next(&mut self) -> Result<String> {
        self.words.pop().context("the query has no end")
    }

    fn expect(&mut self, wanted: &str) -> Result<()> {
        let word = self.next()?;
        ensure!(word == wanted, "{word:?} where {wanted:?} should be");
        Ok(())
    }

    fn take(&mut self, wanted: &[&str]) -> Option<String> {
        self.words.pop_if(|word| wanted.contains(&word.as_str()))
    }

    /// `and` and `unless`, from left to right.
    fn sets(&mut self) -> Result<Vec<Sample>> {
        let mut left = self.comparison()?;
        while let Some(operator) = self.take(&["and", "unless"]) {
            let on = if self.take(&["on"]).is_some() { Some(self.labels()?) } else { None };
            let right = self.comparison()?;
            let key = |sample: &Sample| match &on {
                Some(on) => only(&sample.labels, on),
                None => without_name(&sample.labels),
            };
            let has = |sample: &Sample| right.iter().any(|other| key(other) == key(sample));
            left.retain(|sample| has(sample) == (operator == "and"));
        }
        Ok(left)
    }

    /// A comparison with a number leaves those for which it holds.
    fn comparison(&mut self) -> Result<Vec<Sample>> {
        let mut left = self.primary()?;
        if let Some(sign) = self.take(&["==", "!=", ">", "<", ">=", "<="]) {
            let number: f64 = self.next()?.parse()?;
            left.retain(|Sample { value, .. }| match sign.as_str() {
                ">" => *value > number,
                "<" => *value < number,
                ">=" => *value >= number,
                "<=" => *value <= number,
                sign => (value.total_cmp(&number).is_eq()) == (sign == "=="),
            });
        }
        Ok(left)
    }

    fn primary(&mut self) -> Result<Vec<Sample>> {
        let word = self.next()?;
        match word.as_str() {
            "(" => self.closed(),
            "rate" => {
                self.expect("(")?;
                let mut samples = self.closed()?;
                samples.iter_mut().for_each(|sample| sample.labels = without_name(&sample.labels));
                Ok(samples)
            }
            "sum" | "max" => {
                self.expect("by")?;
                let by = self.labels()?;
                self.expect("(")?;
                let mut groups: BTreeMap<Labels, f64> = BTreeMap::new();
                for Sample { labels, value } in self.closed()? {
                    let group = groups.entry(only(&labels, &by));
                    let join = if word == "sum" { |a, b| a + b } else { f64::max };
                    group.and_modify(|held| *held = join(*held, value)).or_insert(value);
                }
                Ok(groups.into_iter().map(|(labels, value)| Sample { labels, value }).collect())
            }
            metric => self.selector(metric),
        }
    }

    /// Evaluates a query up to a closing bracket.
    fn closed(&mut self) -> Result<Vec<Sample>> {
        let inner = self.sets()?;
        self.expect(")")?;
        Ok(inner)
    }

    fn labels(&mut self) -> Result<Vec<String>> {
        self.expect("(")?;
        let mut labels = Vec::new();
        loop {
            match self.next()?.as_str() {
                ")" => return Ok(labels),
                "," => {}
                label => labels.push(label.to_owned()),
            }
        }
    }

    fn selector(&mut self, metric: &str) -> Result<Vec<Sample>> {
        ensure!(metric.starts_with(|c: char| c.is_ascii_alphabetic()), "{metric:?} is no metric");
        let is = |sample: &Sample, label: &str, value: &str| {
            sample.labels.get(label).map_or("", String::as_str) == value
        };
        let mut found: Vec<_> =
            self.series.iter().filter(|sample| is(sample, "__name__", metric)).cloned().collect();
        if self.take(&["{"]).is_some() {
            loop {
                let (label, sign, value) = (self.next()?, self.next()?, self.next()?);
                let value = value.trim_matches('"');
                match sign.as_str() {
                    "=" => found.retain(|sample| is(sample, &label, value)),
                    "!=" => found.retain(|sample| !is(sample, &label, value)),
                    other => bail!("{other} is not known here"),
                }
                match self.next()?.as_str() {
                    "," => {}
                    "}" => break,
                    other => bail!("{other:?} in a selector"),
                }
            }
        }
        if self.take(&["["]).is_some() {
            self.next()?;
            self.expect("]")?;
        }
        Ok(found)
    }
}

fn only(labels: &Labels, names: &[String]) -> Labels {
    labels.iter().filter(|(name, _)| names.contains(name)).map(|(a, b)| (a.clone(), b.clone())).collect()
}

fn without_name(labels: &Labels) -> Labels {
    labels.iter().filter(|(name, _)| *name != "__name__").map(|(a, b)| (a.clone(), b.clone())).collect()
}
