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
fn comments_are_no_wider_than_100_columns() {
    let mut wide = Vec::new();
    for path in page::files(&["rs"]) {
        let found = wide_comments(&page::text(&path));
        wide.extend(found.into_iter().map(|number| format!("{path}:{number}")));
    }
    assert!(wide.is_empty(), "comments wider than {COMMENT} columns:\n{}", wide.join("\n"));
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
