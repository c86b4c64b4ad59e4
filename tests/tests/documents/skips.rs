//! Reports of skipped tests: a test that lacks something that it needs reports it where it is seen
//! and counted.

use crate::page;

/// The test harness captures the output of a test that passes, so a skip would be invisible.
#[test]
fn skips_are_said_past_the_harness() {
    let of_a_harness = |path: &String| !path.starts_with("xtask/");
    let mut silent = Vec::new();
    let mut aloud = 0;
    for path in page::files(&["rs"]).into_iter().filter(of_a_harness) {
        let text = page::text(&path);
        aloud += usize::from(text.contains("\"SKIPPED "));
        for (at, _) in text.match_indices("println!(") {
            let statement = text[at..].split(';').next().unwrap();
            if statement.contains("\"SKIPPED ") {
                silent.push(format!("{path}:{}", text[..at].lines().count()));
            }
        }
    }
    assert!(silent.is_empty(), "traffic_policy_testing::skipped says it aloud: {}", silent.join(", "));
    assert!(aloud > 0, "they are said in other words by now");
}
