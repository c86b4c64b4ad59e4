//! docs/outcomes.md: every outcome with its verdict, its reason and its remedy.

use traffic_policy_dataplane::advice::{self, Context};
use traffic_policy_ebpf::outcome::{Outcome, Verdict};

use crate::page;

const PAGE: &str = "docs/outcomes.md";

/// The parts of the page, and the first words of the outcomes in them.
const GROUPS: [(&str, &[&str]); 4] = [
    ("served", &["forwarded", "replied", "delivered", "connected"]),
    ("rejected", &["rejected", "reset"]),
    ("dropped", &["dropped"]),
    ("passed", &["passed"]),
];

#[test]
fn the_page_lists_every_outcome_with_reason_and_fix() {
    for (name, _) in GROUPS {
        page::compare(PAGE, name, &table(name));
    }
    let listed: usize = GROUPS.iter().map(|(name, _)| of_group(name).len()).sum();
    assert_eq!(listed, Outcome::ALL.len(), "an outcome belongs to no group, or to two");
}

fn of_group(name: &str) -> Vec<Outcome> {
    let (_, verbs) = GROUPS.iter().find(|(group, _)| *group == name).unwrap();
    let of = |outcome: &Outcome| verbs.contains(&outcome.name().split('-').next().unwrap());
    Outcome::ALL.iter().copied().filter(of).collect()
}

fn table(group: &str) -> String {
    let context = Context::default();
    let rows: Vec<_> = of_group(group)
        .into_iter()
        .map(|outcome| {
            let verdict = match outcome.verdict() {
                Verdict::Pass => "pass",
                Verdict::Drop => "drop",
                Verdict::Send => "send",
            };
            let fix = advice::fix(outcome, &context).unwrap_or_else(|| "–".to_owned());
            vec![
                format!("`{}`", outcome.name()),
                (outcome as u32).to_string(),
                verdict.to_owned(),
                page::cell(&advice::reason(outcome, &context)),
                page::cell(&fix),
            ]
        })
        .collect();
    page::table(&["Outcome", "No.", "Verdict", "Reason", "Remedy"], &rows)
}
