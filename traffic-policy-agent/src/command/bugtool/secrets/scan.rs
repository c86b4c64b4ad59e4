//! One line, read from left to right: quotation marks, brackets, and what stands between a name and its value.

use super::REDACTED;

/// Characters of names. No `=`: it separates a name from its value.
pub(super) fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || "-_.+/~@%".contains(c)
}

/// A quotation mark, and how many backslashes stand before it: one or more within JSON that is a text of JSON.
pub(super) type Mark = (char, usize);

/// What stands between a name and its value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sign {
    /// In bytes: with the mark that closes the name, and the blanks around.
    pub(super) len: usize,
    /// `=`, or `:`.
    pub(super) equals: bool,
    /// Whether there are blanks.
    pub(super) blanks: bool,
    /// Whether the name is in quotation marks.
    pub(super) quoted: bool,
}

impl Sign {
    /// The sign with which a text begins.
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

/// The line, without its end, and what was copied of it.
#[derive(Debug)]
pub(super) struct Scan<'a> {
    line: &'a str,
    result: &'a mut String,
    /// Offset in bytes.
    at: usize,
    /// The quotation that is open, and the brackets that were open before it.
    quotation: Option<(Mark, Vec<char>)>,
    /// Those that close what is open.
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

    /// The rest up to the mark that closes the quotation which is open, and whether it is that of the line.
    pub(super) fn text(&self) -> (&'a str, bool) {
        let rest = self.rest();
        match &self.quotation {
            Some((mark, _)) => (&rest[..closing(rest, *mark).unwrap_or(rest.len())], false),
            None => (rest, true),
        }
    }

    /// The bracket that closes the innermost one that is open, within the quotation.
    pub(super) fn bracket(&self) -> Option<char> {
        self.brackets.last().copied()
    }

    /// Copies so many bytes, with note of quotations and brackets.
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

    /// Takes note of a quotation mark.
    fn meet(&mut self, at: usize, c: char) {
        let before = &self.line[..at];
        let mark = (c, backslashes(before));
        match self.quotation.take() {
            None if !before.ends_with(|c: char| c.is_alphanumeric()) => {
                self.quotation = Some((mark, std::mem::take(&mut self.brackets)));
            }
            // An apostrophe, or inches.
            None => {}
            Some((open, brackets)) if closes(mark, open, &self.line[at + 1..]) => self.brackets = brackets,
            open => self.quotation = open,
        }
    }

    /// Copies so many bytes as they are.
    pub(super) fn pass(&mut self, len: usize) {
        self.result.push_str(&self.line[self.at..self.at + len]);
        self.at += len;
    }

    /// Leaves out so many bytes.
    pub(super) fn leave_out(&mut self, len: usize) {
        if len > 0 {
            self.result.push_str(REDACTED);
            self.at += len;
        }
    }
}

/// The quotation mark with which a text begins.
pub(super) fn opening(text: &str) -> Option<Mark> {
    let mark = text.trim_start_matches('\\');
    Some((mark.chars().next().filter(|c| ['"', '\''].contains(c))?, text.len() - mark.len()))
}

/// Offset in bytes of the mark that closes a quotation, or of the first backslash before it. Something that can follow
/// a value stands behind it: not so in `it's` and `'it''s'`.
pub(super) fn closing(text: &str, (mark, escapes): Mark) -> Option<usize> {
    let mut marks = text.match_indices(mark).map(|(at, _)| (at, backslashes(&text[..at])));
    let (at, before) =
        marks.find(|(at, before)| closes((mark, *before), (mark, escapes), &text[at + 1..]))?;
    Some(at - before)
}

fn closes(mark: Mark, open: Mark, behind: &str) -> bool {
    mark.0 == open.0 && mark.1 <= open.1 && is_end(behind)
}

/// Whether a value may have ended before this text.
pub(super) fn is_end(behind: &str) -> bool {
    behind.chars().next().is_none_or(|c| c.is_whitespace() || ",;:=&)]}\\".contains(c))
}

/// Number of backslashes at the end of a text.
fn backslashes(text: &str) -> usize {
    text.len() - text.trim_end_matches('\\').len()
}
