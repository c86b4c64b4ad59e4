//! Tests that find their means missing say so where it is seen and counted.

use crate::page;

/// The test harness keeps to itself what a test prints that passes: such a skip would be seen by nobody.
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
