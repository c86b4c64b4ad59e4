//! One line, scanned from left to right: quotation marks, brackets, and the sign between a name and
//! its value.

use super::REDACTED;

/// Whether a character can be part of a name. `=` cannot: it separates a name from its value.
pub(super) fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || "-_.+/~@%".contains(c)
}

/// A quotation mark, and the number of backslashes before it: one or more in JSON that is nested in
/// a JSON string.
pub(super) type Mark = (char, usize);

/// The text between a name and its value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sign {
    /// Length in bytes, including the mark that closes the name and the surrounding blanks.
    pub(super) len: usize,
    /// Whether it is `=`, not `:`.
    pub(super) equals: bool,
    /// Whether it contains blanks.
    pub(super) blanks: bool,
    /// Whether the name is in quotation marks.
    pub(super) quoted: bool,
}

impl Sign {
    /// Returns the sign with which a text begins.
    pub(super) fn of(text: &str) -> Option<Self> {
        let unquoted = text.trim_start_matches('\\').strip_prefix(['"', '\'']);
        let before = unquoted.unwrap_or(text);
        let begin = before.trim_start();
        let signs = begin.trim_start_matches([':', '=']);
        if signs.len() == begin.len() {
            return None;
        }
        let behind = signs.strip_prefix('>').unwrap_or(signs);
        let value = behind.trim_start();
        Some(Self {
            len: text.len() - value.len(),
            equals: begin.starts_with('='),
            blanks: before.len() != begin.len() || behind.len() != value.len(),
            quoted: unquoted.is_some(),
        })
    }
}

/// The line, without its line ending, and the part copied so far.
#[derive(Debug)]
pub(super) struct Scan<'a> {
    line: &'a str,
    result: &'a mut String,
    /// Offset in bytes.
    at: usize,
    /// The open quotation, and the brackets that were open before it.
    quotation: Option<(Mark, Vec<char>)>,
    /// The brackets that close the open ones.
    brackets: Vec<char>,
}

impl<'a> Scan<'a> {
    pub(super) fn new(line: &'a str, result: &'a mut String) -> Self {
        Self { line, result, at: 0, quotation: None, brackets: Vec::new() }
    }

    pub(super) fn before(&self) -> &'a str {
        &self.line[..self.at]
    }

    pub(super) fn rest(&self) -> &'a str {
        &self.line[self.at..]
    }

    /// Returns the rest up to the mark that closes the open quotation, and whether it is the rest
    /// of the line.
    pub(super) fn text(&self) -> (&'a str, bool) {
        let rest = self.rest();
        match &self.quotation {
            Some((mark, _)) => (&rest[..closing(rest, *mark).unwrap_or(rest.len())], false),
            None => (rest, true),
        }
    }

    /// Returns the bracket that closes the innermost open one within the quotation.
    pub(super) fn bracket(&self) -> Option<char> {
        self.brackets.last().copied()
    }

    /// Copies `len` bytes and tracks quotations and brackets.
    pub(super) fn copy(&mut self, len: usize) {
        let end = self.at + len;
        let (line, from) = (self.line, self.at);
        for (at, c) in line[from..end].char_indices().map(|(at, c)| (from + at, c)) {
            match c {
                '"' | '\'' => self.meet(at, c),
                '[' => self.brackets.push(']'),
                '{' => self.brackets.push('}'),
                ']' | '}' if self.bracket() == Some(c) => {
                    self.brackets.pop();
                }
                _ => {}
            }
        }
        self.pass(len);
    }

    /// Tracks a quotation mark.
    fn meet(&mut self, at: usize, c: char) {
        let before = &self.line[..at];
        let mark = (c, backslashes(before));
        match self.quotation.take() {
            None if !before.ends_with(|c: char| c.is_alphanumeric()) => {
                self.quotation = Some((mark, std::mem::take(&mut self.brackets)));
            }
            // The mark is an apostrophe, or stands for inches.
            None => {}
            Some((open, brackets)) if closes(mark, open, &self.line[at + 1..]) => self.brackets = brackets,
            open => self.quotation = open,
        }
    }

    /// Copies `len` bytes as they are.
    pub(super) fn pass(&mut self, len: usize) {
        self.result.push_str(&self.line[self.at..self.at + len]);
        self.at += len;
    }

    /// Skips `len` bytes.
    pub(super) fn leave_out(&mut self, len: usize) {
        if len > 0 {
            self.result.push_str(REDACTED);
            self.at += len;
        }
    }
}

/// Returns the quotation mark with which a text begins.
pub(super) fn opening(text: &str) -> Option<Mark> {
    let mark = text.trim_start_matches('\\');
    Some((mark.chars().next().filter(|c| ['"', '\''].contains(c))?, text.len() - mark.len()))
}

/// Returns the offset in bytes of the mark that closes a quotation, or of the first backslash
/// before it. The mark must precede text that can follow a value, unlike in `it's` and `'it''s'`.
pub(super) fn closing(text: &str, (mark, escapes): Mark) -> Option<usize> {
    let mut marks = text.match_indices(mark).map(|(at, _)| (at, backslashes(&text[..at])));
    let (at, before) =
        marks.find(|(at, before)| closes((mark, *before), (mark, escapes), &text[at + 1..]))?;
    Some(at - before)
}

fn closes(mark: Mark, open: Mark, behind: &str) -> bool {
    mark.0 == open.0 && mark.1 <= open.1 && is_end(behind)
}

/// Whether a value may end before this text.
pub(super) fn is_end(behind: &str) -> bool {
    behind.chars().next().is_none_or(|c| c.is_whitespace() || ",;:=&)]}\\".contains(c))
}

/// Returns the number of backslashes at the end of a text.
fn backslashes(text: &str) -> usize {
    text.len() - text.trim_end_matches('\\').len()
}
