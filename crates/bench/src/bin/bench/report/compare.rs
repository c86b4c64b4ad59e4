//! Comparison of two reports.

use std::{collections::BTreeSet, fmt::Write as _};

use super::{
    Report, Row, machine,
    row::Figure,
    table::{short, signed},
};

/// Returns a table of all rows of both reports, with the reasons why absolute figures cannot be
/// compared.
pub(crate) fn compare(before: &Report, after: &Report) -> String {
    let mut text = String::new();
    for (name, report) in [("A", before), ("B", after)] {
        let run = &report.run;
        let commit = run.commit.get(..10).unwrap_or("unknown");
        let dirty = if run.dirty { " with changes" } else { "" };
        writeln!(text, "{name}: {}, commit {commit}{dirty}, `{}`", run.date, run.command).ok();
    }
    let differences = differences(before, after);
    if !differences.is_empty() {
        writeln!(text, "\nNot the same machine: compare ratios only.\n{}", differences.join("\n")).ok();
    }
    let mut group = "";
    for row in &after.rows {
        let Some(old) = find(before, row) else { continue };
        if row.group != group {
            group = &row.group;
            writeln!(text, "\n{group:<66} {:>10} {:>10} {:>8}  {:<13} ratio A → B", "A", "B", "change", "")
                .ok();
        }
        line(&mut text, old, row, differences.is_empty()).ok();
    }
    for (name, one, other) in [("A", before, after), ("B", after, before)] {
        let only: Vec<_> = one.rows.iter().filter(|row| find(other, row).is_none()).collect();
        if !only.is_empty() {
            writeln!(text, "\nOnly in {name}:").ok();
            only.iter().for_each(|row| writeln!(text, "  {}, {}", row.group, row.name).unwrap_or_default());
        }
    }
    text
}

fn find<'a>(report: &'a Report, row: &Row) -> Option<&'a Row> {
    report
        .rows
        .iter()
        .find(|other| (&other.group, &other.name, other.unit) == (&row.group, &row.name, row.unit))
}

fn line(text: &mut String, old: &Row, new: &Row, same_machine: bool) -> std::fmt::Result {
    let value = |row: &Row| format!("{} {}", short(row.figure.median), row.unit.symbol());
    let ratios = old.reference.as_ref().zip(new.reference.as_ref());
    // A ratio, where there is one, is more significant than the figure; on another machine, only
    // the ratio is significant.
    let changed = match (&ratios, same_machine) {
        (Some((old, new)), _) => verdict(&old.ratio, &new.ratio),
        (None, true) => verdict(&old.figure, &new.figure),
        (None, false) => "not comparable",
    };
    writeln!(
        text,
        "  {:<64} {:>10} {:>10} {:>7}%  {changed:<13} {}",
        new.name,
        value(old),
        value(new),
        signed((new.figure.median / old.figure.median - 1.0) * 100.0),
        ratios.map_or_else(String::new, |(old, new)| format!(
            "{:.2} → {:.2} ({}%)",
            old.ratio.median,
            new.ratio.median,
            signed((new.ratio.median / old.ratio.median - 1.0) * 100.0)
        )),
    )
}

/// Fraction by which two measurements of the same programs differ.
const LEAST: f64 = 0.03;

/// Whether two figures differ by more than the runs of each among themselves.
fn verdict(old: &Figure, new: &Figure) -> &'static str {
    if (new.median / old.median - 1.0).abs() < LEAST {
        "within spread"
    } else if new.lower > old.upper {
        "more"
    } else if new.upper < old.lower {
        "less"
    } else {
        "within spread"
    }
}

/// Returns the differences in kernel, processor or settings.
fn differences(before: &Report, after: &Report) -> Vec<String> {
    let keys: BTreeSet<_> = before.environment.keys().chain(after.environment.keys()).collect();
    let decisive =
        keys.into_iter().filter(|key| machine::DECISIVE.iter().any(|prefix| key.starts_with(prefix)));
    let value = |report: &Report, key: &str| {
        report.environment.get(key).cloned().unwrap_or_else(|| "unknown".to_owned())
    };
    decisive
        .filter_map(|key| {
            let (a, b) = (value(before, key), value(after, key));
            (a != b).then(|| format!("  {key}: A {a}, B {b}"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{super::Unit, *};

    fn report(ours: f64, kernel: &str) -> Report {
        let mut report = Report::listing();
        let runs = |median: f64| vec![median * 0.99, median, median * 1.01];
        let row = Row::new("established", "request", Unit::Nanoseconds, &runs(ours));
        report.rows.push(row.beside("floor", &[30.0, 30.0, 30.0]));
        report.rows.push(Row::new("refused", "drop", Unit::Nanoseconds, &runs(ours)));
        report.environment.insert("kernel".to_owned(), kernel.to_owned());
        report
    }

    #[test]
    fn changes_beyond_the_spread_are_named() {
        let text = compare(&report(33.0, "6.18"), &report(39.0, "6.18"));
        assert!(text.contains("18.2%  more"), "{text}");
        assert!(text.contains("1.10 → 1.30 (+18.2%)"), "{text}");
        assert!(!text.contains("Not the same machine"), "{text}");
        let text = compare(&report(33.0, "6.18"), &report(33.2, "6.18"));
        assert_eq!(text.matches("within spread").count(), 2, "{text}");
    }

    #[test]
    fn of_another_machine_only_ratios_count() {
        let text = compare(&report(33.0, "6.18"), &report(39.0, "6.12"));
        assert!(text.contains("  kernel: A 6.18, B 6.12"), "{text}");
        assert!(text.contains("not comparable") && text.contains("more"), "{text}");
    }

    #[test]
    fn reports_are_read_as_they_were_written() {
        let written = serde_json::json!(report(33.0, "6.18"));
        let read: Report = serde_json::from_value(written.clone()).unwrap();
        assert_eq!(serde_json::json!(read), written);
    }
}
