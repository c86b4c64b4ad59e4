//! The first words of docstrings. A docstring is a sentence, or names a thing: a preposition, or a
//! word that asks, begins neither.

use crate::page;

const PREPOSITIONS: [&str; 12] =
    ["About", "As", "At", "Behind", "By", "For", "From", "In", "Of", "To", "With", "Within"];
const QUESTIONS: [&str; 7] = ["How", "What", "Where", "Which", "Who", "Whose", "Why"];

#[test]
fn docstrings_begin_with_a_noun_or_a_verb() {
    let mut wrong = Vec::new();
    for path in page::files(&["rs"]) {
        let text = page::text(&path);
        let found = bare(&text);
        wrong.extend(found.into_iter().map(|(number, word)| format!("{path}:{number}: {word}")));
    }
    assert!(wrong.is_empty(), "docstrings begin with these words:\n{}", wrong.join("\n"));
}

#[test]
fn the_first_word_of_a_docstring_counts() {
    for (text, found) in [
        ("//! Of a file.\n", Some((1, "Of"))),
        ("/// The name\n/// Of a thing.\n", None),
        ("/// The name.\n///\n/// In short.\n", None),
        ("fn f() {}\n    /// With a port.\n", Some((2, "With"))),
        ("/// Whether it is.\n/// Inner.\n", None),
        ("// In a comment.\n", None),
        ("/// As-is.\n", None),
    ] {
        assert_eq!(bare(text), found.into_iter().collect::<Vec<_>>(), "{text}");
    }
}

/// Returns the first words of docstrings that are none of a sentence or of a name, and their lines.
fn bare(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut before = None;
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim_start();
        let mark = ["///", "//!"].into_iter().find(|mark| line.starts_with(mark));
        if let Some(mark) = mark
            && before != Some(mark)
        {
            let word = line[mark.len()..].split_whitespace().next().unwrap_or_default();
            if PREPOSITIONS.contains(&word) || QUESTIONS.contains(&word) {
                found.push((number, word));
            }
        }
        before = mark;
    }
    found
}
