//! Pages of Markdown, and the parts of them that are generated from the code.
//!
//! Such a part lies between two comments, which GitHub does not show: `<!-- made from the code:
//! NAME -->` and `<!-- end -->`.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

/// The root folder of the project.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// The text of a page, by its path from the root.
pub fn text(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// All pages, by their paths from the root.
pub fn all() -> Vec<String> {
    files(&["md"])
}

/// All files with one of these extensions, by their paths from the root. Build output and hidden
/// folders are left out.
pub fn files(extensions: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    walk(&root(), extensions, &mut found);
    let root = root();
    let mut names: Vec<_> =
        found.iter().map(|path| path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned()).collect();
    names.sort();
    names
}

fn walk(folder: &Path, extensions: &[&str], found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy();
        if name.starts_with('.') || name == "target" {
            continue;
        }
        if path.is_dir() {
            walk(&path, extensions, found);
        } else if extensions.iter().any(|extension| path.extension().is_some_and(|own| own == *extension)) {
            found.push(path);
        }
    }
}

/// The lines of a text with their numbers, and whether each is inside a fenced block.
pub fn lines(text: &str) -> impl Iterator<Item = (usize, &str, bool)> {
    let mut fenced = false;
    (1..).zip(text.lines()).filter_map(move |(number, line)| {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            return None;
        }
        Some((number, line, fenced))
    })
}

/// The texts between backticks on a line.
pub fn code_spans(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// The cells of a table row, or `None` for another line.
pub fn cells(line: &str) -> Option<Vec<String>> {
    let inner = line.trim().strip_prefix('|')?.strip_suffix('|')?;
    // A bar within a cell is written `\|`.
    let inner = inner.replace("\\|", "\0");
    Some(inner.split('|').map(|cell| cell.trim().replace('\0', "\\|")).collect())
}

/// Formats a row of a table.
pub fn row<T: AsRef<str>>(cells: &[T]) -> String {
    let padded = cells.iter().map(AsRef::as_ref).map(|cell| match cell {
        "" => " ".to_owned(),
        cell => format!(" {cell} "),
    });
    format!("|{}|\n", padded.collect::<Vec<_>>().join("|"))
}

/// Formats a text as a cell: one line, with bars escaped.
pub fn cell(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|").replace('<', "&lt;")
}

/// Formats a table with these headings.
pub fn table<T: AsRef<str>>(headings: &[&str], rows: &[Vec<T>]) -> String {
    let mut text = row(headings);
    text.push_str(&format!("|{}\n", "---|".repeat(headings.len())));
    for cells in rows {
        text.push_str(&row(cells));
    }
    text
}

/// The part of a page with this name.
pub fn part(path: &str, name: &str) -> String {
    let page = text(path);
    let (begin, end) = place(&page, path, name);
    page[begin..end].trim_matches('\n').to_owned() + "\n"
}

/// Compares the part of a page with the expected text; with `UPDATE_DOCS=1`, writes it instead.
pub fn compare(path: &str, name: &str, expected: &str) {
    let written = part(path, name);
    let expected = expected.trim_matches('\n').to_owned() + "\n";
    if written == expected {
        return;
    }
    if env::var_os("UPDATE_DOCS").is_some_and(|value| value == "1") {
        let page = text(path);
        let (begin, end) = place(&page, path, name);
        let page = format!("{}\n{expected}\n{}", &page[..begin], &page[end..]);
        fs::write(root().join(path), page).unwrap();
        return;
    }
    panic!(
        "{path}, part `{name}`, is not what the code has (`UPDATE_DOCS=1 cargo xtask test documents` writes it anew)\n{}",
        difference(&written, &expected)
    );
}

/// The extent of the part: after the first comment, before the second.
fn place(page: &str, path: &str, name: &str) -> (usize, usize) {
    let mark = format!("<!-- made from the code: {name} -->\n");
    let Some(begin) = page.find(&mark).map(|at| at + mark.len()) else {
        panic!("{path} has no part `{name}`: write {mark}<!-- end -->")
    };
    let Some(end) = page[begin..].find("<!-- end -->") else { panic!("{path}: part `{name}` does not end") };
    (begin, begin + end)
}

/// The lines that only one of the two texts has.
fn difference(written: &str, expected: &str) -> String {
    let only = |these: &str, those: &str, sign: char| -> Vec<String> {
        these
            .lines()
            .filter(|line| !those.lines().any(|other| other == *line))
            .map(|line| format!("{sign} {line}"))
            .collect()
    };
    let lines = [only(written, expected, '-'), only(expected, written, '+')].concat();
    if lines.is_empty() { "the order differs".to_owned() } else { lines.join("\n") }
}
