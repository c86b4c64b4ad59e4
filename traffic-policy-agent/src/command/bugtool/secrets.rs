//! Removal of tokens, keys and passwords from text that is passed on. Where the end of a secret is
//! in doubt, too much is removed.

mod scan;
#[cfg(test)]
mod tests;

use scan::{Mark, Scan, Sign, closing, is_end, is_word, opening};

/// The scheme of a bearer token: a blank alone separates it from the token.
const BEARER: &str = "bearer";
const AUTHORIZATION: &str = "authorization";
/// Text that replaces a secret.
const REDACTED: &str = "(left out)";
/// Suffixes of names whose value is a secret: `token: x`, `"password":"x"`, `client-key-data=x`,
/// `Bearer x`. They are in lower case without punctuation: `access-token`, `access_token` and
/// `accessToken` are one, and `x-api-key` ends in `apikey`.
const NAMES: [&str; 11] = [
    AUTHORIZATION,
    BEARER,
    "token",
    "password",
    "passwd",
    "secret",
    "apikey",
    "accesskey",
    "clientkeydata",
    "clientcertificatedata",
    "certificateauthoritydata",
];
/// Schemes of an `Authorization` header whose credentials are one word. The scheme is kept: it
/// shows which one was tried.
const SCHEMES: [&str; 6] = ["basic", BEARER, "negotiate", "ntlm", "token", "apikey"];
/// Schemes whose credentials are several words.
const LONG_SCHEMES: [&str; 3] = ["digest", "aws4hmacsha256", "hawk"];
/// Keys of the name in a pair `name: X-Api-Key`, `value: x`, the form of probe headers and
/// container variables.
const NAME_OF_PAIR: [&str; 3] = ["name", "key", "header"];
/// Keys of the value in such a pair.
const VALUE_OF_PAIR: [&str; 2] = ["value", "values"];
/// Number of lines below the name of such a pair in which its value is looked for.
const PAIR_LINES: u32 = 2;

/// Returns a word in the form used by [`NAMES`].
fn plain(word: &str) -> String {
    word.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

fn is_name(plain: &str) -> bool {
    NAMES.iter().any(|name| plain.ends_with(name))
}

/// Returns the text without secrets: values of names of secrets, words that follow `Bearer`, JSON
/// web tokens, passwords of URLs and PEM blocks.
pub(super) fn redacted(bytes: &[u8]) -> Vec<u8> {
    let text = String::from_utf8_lossy(bytes);
    let mut result = String::with_capacity(text.len());
    let mut in_block = false;
    let mut lines = Lines::default();
    for line in text.split_inclusive('\n') {
        let begins = line.contains("-----BEGIN ");
        let ends = line.contains("-----END ");
        if in_block || begins {
            if !in_block {
                result.push_str(line.split("-----BEGIN ").next().unwrap_or_default());
                result.push_str(REDACTED);
                result.push('\n');
            }
            in_block = !ends;
            continue;
        }
        lines.push(&mut result, &without_passwords(line));
    }
    result.into_bytes()
}

/// Returns a line without the user:password@ of its URLs.
fn without_passwords(line: &str) -> String {
    let mut result = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((before, behind)) = rest.split_once("://") {
        result.push_str(before);
        result.push_str("://");
        let end = behind.find(|c: char| c.is_whitespace() || "/\"'".contains(c)).unwrap_or(behind.len());
        rest = match behind[..end].rfind('@') {
            Some(at) => {
                result.push_str(REDACTED);
                &behind[at..]
            }
            None => behind,
        };
    }
    result + rest
}

/// State that is carried from one line to the next.
#[derive(Debug, Default)]
struct Lines {
    /// A value that continues below the line of its name.
    below: Option<Below>,
    /// The name in a pair, if it is that of a secret, and the number of further lines in which its
    /// value may appear.
    named: Option<(String, u32)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Below {
    /// A block: it ends before the first line that is indented by no more than this number of
    /// bytes.
    Indented(usize),
    /// A list: it ends with the line that begins or ends with `]`.
    List,
    /// A name without a value on its line, indented by this number of bytes: its value comes next,
    /// or names of its own.
    Open(usize),
}

impl Lines {
    fn push(&mut self, result: &mut String, line: &str) {
        if self.hides(line) {
            return hide(result, line);
        }
        self.named = match self.named.take() {
            Some((name, lines @ 1..)) => Some((name, lines - 1)),
            _ => None,
        };
        let text = line.trim_end_matches(['\r', '\n']);
        let mut scan = Scan::new(text, result);
        while !scan.rest().is_empty() {
            let rest = scan.rest();
            let word = &rest[..rest.find(|c| !is_word(c)).unwrap_or(rest.len())];
            if word.is_empty() {
                scan.copy(rest.find(is_word).unwrap_or(rest.len()));
                continue;
            }
            // Base64 of `{"`, with which each JSON web token begins.
            if word.starts_with("eyJ") && word.len() > 20 {
                scan.leave_out(word.len());
                continue;
            }
            let before = scan.before();
            scan.copy(word.len());
            let name = plain(word);
            match Sign::of(scan.rest()) {
                Some(sign) => self.push_named(&mut scan, &sign, word, name, before),
                None if name == BEARER => push_bearer(&mut scan),
                None => {}
            }
        }
        result.push_str(&line[text.len()..]);
    }

    /// Whether a line belongs to the value of a name above it.
    fn hides(&mut self, line: &str) -> bool {
        let text = line.trim();
        let indent = line.len() - line.trim_start().len();
        let hides = match self.below {
            None => return false,
            Some(Below::Indented(of)) => indent > of || text.is_empty(),
            Some(Below::List) => {
                if text.trim_end_matches([',', ';', '}']).ends_with(']') {
                    self.below = None;
                }
                !text.starts_with(']')
            }
            Some(Below::Open(_)) if text.is_empty() => return false,
            Some(Below::Open(of)) => {
                let is_below = indent > of || (indent == of && text.starts_with("- "));
                is_below && !has_name(text)
            }
        };
        if !hides {
            self.below = None;
        }
        hides
    }

    /// Appends the value of a word, or nothing if it is to be read like other text. `name` is the
    /// word in the form of [`plain`]; `before` is the line before it.
    fn push_named(&mut self, scan: &mut Scan<'_>, sign: &Sign, word: &str, name: String, before: &str) {
        if NAME_OF_PAIR.contains(&name.as_str()) {
            // The value follows a key of its own.
            let value = scan.rest()[sign.len..].trim_start_matches(['\\', '"', '\'']);
            let own = plain(&value[..value.find(|c| !is_word(c)).unwrap_or(value.len())]);
            self.named = is_name(&own).then_some((own, PAIR_LINES));
            return;
        }
        // `/run/token: no such file` is a message.
        let is_path = word.starts_with('/') && sign.blanks && !sign.equals;
        let name = match self.named.take_if(|_| VALUE_OF_PAIR.contains(&name.as_str())) {
            Some((named, _)) => named,
            None if is_name(&name) && !is_path => name,
            None => return,
        };
        scan.copy(sign.len);
        let column = column(before);
        let (text, is_line) = scan.text();
        if text.is_empty() {
            self.below = is_line.then_some(Below::Open(column));
        } else if is_line && is_indicator(text) {
            self.below = Some(Below::Indented(column));
            scan.pass(text.len());
        } else if !sign.equals && opens_object(text) {
            // The names in the value are judged by themselves, but this name may be that of a pair.
            self.named = Some((name, PAIR_LINES));
        } else if text.starts_with('[') {
            if !push_list(scan, &name) && is_line {
                self.below = Some(Below::List);
            }
        } else if let Some(mark) = opening(text) {
            if !push_quoted(scan, &name, mark) && is_line {
                self.below = Some(Below::Indented(column));
            }
        } else {
            // A line of variables, or one word of a command: `PASSWORD=two words`.
            let is_variable = before.trim_start().is_empty() || before.ends_with("export ");
            let is_alone = before.ends_with(['"', '\'']) || (is_variable && !word.starts_with('-'));
            let is_word = sign.equals && !sign.blanks && !is_alone;
            let end = if is_word {
                word_end(text, &name, before)
            } else {
                item_end(text, sign, &name, scan.bracket())
            };
            push_secret(scan, &name, end);
            // The value may also have more words than fit in the line.
            if end == text.len() && is_line && !is_word {
                self.below = Some(Below::Indented(column));
            }
        }
    }
}

/// Returns the number of bytes before the first key of a line of YAML.
fn column(before: &str) -> usize {
    let mut rest = before.trim_start();
    while let Some(item) = rest.strip_prefix("- ") {
        rest = item.trim_start();
    }
    before.len() - rest.len()
}

/// Whether a line below a name has a name of its own.
fn has_name(text: &str) -> bool {
    let text = text.strip_prefix("- ").unwrap_or(text).trim_start();
    match opening(text) {
        Some(mark @ (_, escapes)) => {
            let inner = &text[escapes + 1..];
            closing(inner, mark).is_some_and(|end| Sign::of(&inner[end..]).is_some_and(|sign| !sign.equals))
        }
        None => text.starts_with(['{', '}', ']']) || text.ends_with(':') || text.contains(": "),
    }
}

/// Whether a block of YAML begins below the line: the text is a block indicator, with the signs for
/// line endings.
fn is_indicator(text: &str) -> bool {
    let signs = text.trim_end().strip_prefix(['|', '>']);
    signs.is_some_and(|signs| signs.chars().all(|c| c.is_ascii_digit() || "+-".contains(c)))
}

/// Whether a text begins like an object of JSON or YAML, and not like a secret that begins with the
/// bracket.
fn opens_object(text: &str) -> bool {
    let Some(inner) = text.strip_prefix('{').map(str::trim_start) else { return false };
    let word = inner.find(|c| !is_word(c)).unwrap_or(inner.len());
    let has_key = word > 0 && Sign::of(&inner[word..]).is_some_and(|sign| sign.blanks && !sign.equals);
    inner.is_empty() || inner.starts_with('}') || opening(inner).is_some() || has_key
}

/// Returns the length of a value that is a word, or the scheme and the credentials of a header.
/// Within the query of a URL it also ends at `&`.
fn word_end(text: &str, name: &str, before: &str) -> usize {
    if has_parameters(name, text) {
        return text.len();
    }
    let credentials =
        scheme(name, text).map_or(0, |scheme| text.len() - text[scheme.len()..].trim_start().len());
    let is_query = before.ends_with(['?', '&']);
    let end = text[credentials..].find(|c: char| c.is_whitespace() || (is_query && c == '&'));
    end.map_or(text.len(), |end| credentials + end)
}

/// Returns the length of a value that is an item between brackets, or the rest of the line.
fn item_end(text: &str, sign: &Sign, name: &str, bracket: Option<char>) -> usize {
    let bracket = bracket.filter(|_| !has_parameters(name, text));
    let has_commas = sign.blanks || sign.quoted;
    let end = bracket.and_then(|bracket| text.find(|c| c == bracket || (has_commas && c == ',')));
    end.unwrap_or(text.len())
}

/// Whether parameters follow the scheme of an `Authorization` header, with commas and quotation
/// marks of their own.
fn has_parameters(name: &str, text: &str) -> bool {
    scheme(name, text).is_some_and(|scheme| LONG_SCHEMES.contains(&plain(scheme).as_str()))
}

/// Appends the word that follows `Bearer`, or nothing if that is a name.
fn push_bearer(scan: &mut Scan<'_>) {
    let (text, _) = scan.text();
    let value = text.trim_start();
    if value.is_empty() || value.len() == text.len() {
        return;
    }
    scan.pass(text.len() - value.len());
    let word = value.find(|c| !is_word(c)).unwrap_or(value.len());
    let behind = &value[word..];
    if is_name(&plain(&value[..word])) && Sign::of(behind).is_some_and(|sign| sign.len < behind.len()) {
        return;
    }
    match opening(value) {
        Some(mark) => {
            push_quoted(scan, BEARER, mark);
        }
        None => scan.leave_out(value.find(char::is_whitespace).unwrap_or(value.len())),
    }
}

/// Appends a value that begins with a quotation mark. Returns whether it ends in this line.
fn push_quoted(scan: &mut Scan<'_>, name: &str, mark: Mark) -> bool {
    scan.pass(mark.1 + 1);
    let (text, _) = scan.text();
    let end = closing(text, mark);
    push_secret(scan, name, end.unwrap_or(text.len()));
    let (text, _) = scan.text();
    if end.is_some() {
        scan.pass(text.find(mark.0).map_or(0, |at| at + 1));
    }
    end.is_some()
}

/// Appends a list. Returns whether it ends in this line.
fn push_list(scan: &mut Scan<'_>, name: &str) -> bool {
    scan.pass(1);
    loop {
        let (text, _) = scan.text();
        let item = text.trim_start_matches(|c: char| c.is_whitespace() || c == ',');
        scan.pass(text.len() - item.len());
        if let Some(behind) = item.strip_prefix(']') {
            scan.pass(1);
            // This is not a list but a secret with brackets.
            if !is_end(behind) && opening(behind).is_none() {
                scan.leave_out(behind.len());
            }
            return true;
        }
        match opening(item) {
            _ if item.is_empty() => return false,
            Some(mark) => {
                if !push_quoted(scan, name, mark) {
                    return false;
                }
            }
            None => push_secret(scan, name, item.find(']').unwrap_or(item.len())),
        }
    }
}

/// Appends [`REDACTED`] in place of `len` bytes, behind the scheme of an `Authorization` header.
fn push_secret(scan: &mut Scan<'_>, name: &str, len: usize) {
    let scheme = scheme(name, &scan.rest()[..len]).map_or(0, |scheme| scheme.len() + 1);
    scan.pass(scheme);
    scan.leave_out(len - scheme);
}

/// Returns the scheme with which the value of an `Authorization` header begins.
fn scheme<'a>(name: &str, value: &'a str) -> Option<&'a str> {
    let (scheme, _) = value.split_once(' ').filter(|_| name.ends_with(AUTHORIZATION))?;
    let known = plain(scheme);
    (SCHEMES.contains(&known.as_str()) || LONG_SCHEMES.contains(&known.as_str())).then_some(scheme)
}

/// Appends a line that is nothing but a secret, with the blanks around it.
fn hide(result: &mut String, line: &str) {
    let text = line.trim();
    if text.is_empty() {
        return result.push_str(line);
    }
    let (before, behind) = line.split_once(text).unwrap_or_default();
    result.push_str(before);
    result.push_str(REDACTED);
    result.push_str(behind);
}
