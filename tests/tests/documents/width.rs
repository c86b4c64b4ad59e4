//! Lines of the pages and of the code's comments, which editors and terminals show whole.

use crate::page;

/// Largest width of a page's line, and of a comment's, in characters.
const WIDTH: usize = 120;
const COMMENT: usize = 100;

#[test]
fn lines_are_no_wider_than_120_columns() {
    let mut wide = Vec::new();
    for path in page::all() {
        let found = too_wide(&page::text(&path));
        wide.extend(found.into_iter().map(|(number, width)| format!("{path}:{number}: {width} columns")));
    }
    assert!(wide.is_empty(), "wider than {WIDTH} columns:\n{}", wide.join("\n"));
}

#[test]
fn tables_code_headings_and_targets_may_be_wide() {
    let long = "word ".repeat(WIDTH);
    let target = "x".repeat(WIDTH);
    for text in [
        format!("| {long} |"),
        format!("```\n{long}\n```"),
        format!("## {long}"),
        format!("A [link]({target}) in a sentence."),
        format!("<!-- made from the code: words -->\n{long}\n<!-- end -->"),
        target,
    ] {
        assert_eq!(too_wide(&text), [], "{text}");
    }
    assert_eq!(too_wide(&format!("short\n{}", "word ".repeat(25))), [(2, 124)]);
}

#[test]
fn comments_are_no_wider_than_100_columns() {
    let mut wide = Vec::new();
    for path in page::files(&["rs"]) {
        let found = wide_comments(&page::text(&path));
        wide.extend(found.into_iter().map(|number| format!("{path}:{number}")));
    }
    assert!(wide.is_empty(), "comments wider than {COMMENT} columns:\n{}", wide.join("\n"));
}

#[test]
fn tables_drawings_and_addresses_in_comments_may_be_wide() {
    let long = "word ".repeat(COMMENT);
    for text in [
        format!("/// | {long} |"),
        format!("//! ```text\n//! {long}\n//! ```"),
        format!("// <https://{}>", "x".repeat(COMMENT)),
        format!("let text = \"// {long}\";"),
    ] {
        assert!(wide_comments(&text).is_empty(), "{text}");
    }
    assert_eq!(wide_comments(&format!("fn f() {{}}\n    // {}", "word ".repeat(20))), [2]);
}

/// Numbers of the lines of comments that are too wide. Left out are tables, code, and a single
/// word.
fn wide_comments(text: &str) -> Vec<usize> {
    let mut is_fenced = false;
    let mut wide = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let Some(comment) = line.trim_start().strip_prefix("//") else {
            is_fenced = false;
            continue;
        };
        let comment = comment.trim_start_matches(['/', '!']).trim();
        if comment.starts_with("```") {
            is_fenced = !is_fenced;
        } else if !is_fenced
            && !comment.starts_with('|')
            && comment.contains(' ')
            && line.trim_end().chars().count() > COMMENT
        {
            wide.push(number);
        }
    }
    wide
}

/// Lines of a text that are too wide, with their widths. Left out are tables, code blocks,
/// headings, comments and parts that are made from the code; targets of links do not count, since a
/// reader does not see them, nor does a single word, which cannot be wrapped.
fn too_wide(text: &str) -> Vec<(usize, usize)> {
    let mut is_made = false;
    let mut wide = Vec::new();
    for (number, line, is_fenced) in page::lines(text) {
        let trimmed = line.trim();
        if trimmed.starts_with("<!--") {
            is_made = trimmed.starts_with("<!-- made from");
            continue;
        }
        if is_made || is_fenced || trimmed.starts_with(['|', '#']) || !trimmed.contains(' ') {
            continue;
        }
        let width = shown(line.trim_end()).chars().count();
        if width > WIDTH {
            wide.push((number, width));
        }
    }
    wide
}

/// A line without the targets of its links.
fn shown(line: &str) -> String {
    let mut parts = line.split("](");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        text.push(']');
        text.push_str(part.split_once(')').map_or(part, |(_, behind)| behind));
    }
    text
}
