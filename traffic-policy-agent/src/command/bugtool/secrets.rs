//! Tokens, keys and passwords within text that is handed on.

/// The scheme of a bearer token: a blank is enough between it and the token.
const BEARER: &str = "bearer";
const AUTHORIZATION: &str = "authorization";
/// Text in the place of a secret.
const REDACTED: &str = "(left out)";
/// Ends of names whose value is a secret: `token: x`, `"password":"x"`, `client-key-data=x`, `Bearer x`. In small
/// letters, without signs: `access-token`, `access_token` and `accessToken` are one, and `x-api-key` ends in `apikey`.
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
/// Schemes of an `Authorization` header whose credentials are one word. The scheme is kept: it says what was tried.
const SCHEMES: [&str; 6] = ["basic", BEARER, "negotiate", "ntlm", "token", "apikey"];
/// Schemes whose credentials are several words.
const LONG_SCHEMES: [&str; 3] = ["digest", "aws4hmacsha256", "hawk"];
/// Keys of the name in a pair `name: X-Api-Key`, `value: x`: so headers of probes and variables of containers are
/// written.
const NAME_OF_PAIR: [&str; 3] = ["name", "key", "header"];
/// Keys of the value in such a pair.
const VALUE_OF_PAIR: [&str; 2] = ["value", "values"];
/// Number of lines below the name of such a pair in which its value is looked for.
const PAIR_LINES: u32 = 2;

/// A word as [`NAMES`] has it.
fn plain(word: &str) -> String {
    word.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

fn is_name(plain: &str) -> bool {
    NAMES.iter().any(|name| plain.ends_with(name))
}

/// The text without secrets: words that follow the name of one, JSON web tokens, passwords of URLs, blocks of PEM, and
/// the lines of a list or a block of YAML below the name of one.
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

/// A line without the user:password@ of its URLs.
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

/// Characters that belong to a secret, or to a name of one.
fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || "-_.+/=~@%".contains(c)
}

/// State that is carried from one line to the next.
#[derive(Debug, Default)]
struct Lines {
    /// The list or block that is open below the name of a secret.
    below: Option<Below>,
    /// The name in a pair, if it is that of a secret, and the number of further lines in which its value may stand.
    named: Option<(String, u32)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Below {
    /// A block of YAML: it ends before the first line that is not indented by more than so many bytes.
    Block(usize),
    /// A list: it ends with the line that begins with `]`.
    List,
}

impl Lines {
    fn push(&mut self, result: &mut String, line: &str) {
        let indent = line.len() - line.trim_start().len();
        match self.below {
            Some(Below::Block(of)) if indent > of || line.trim().is_empty() => return hide(result, line),
            Some(Below::List) if !line.trim_start().starts_with(']') => return hide(result, line),
            _ => self.below = None,
        }
        self.named = match self.named.take() {
            Some((name, lines @ 1..)) => Some((name, lines - 1)),
            _ => None,
        };
        let mut rest = line;
        // The word before, if nothing but what may stand between a name and its value came since.
        let mut name = String::new();
        while !rest.is_empty() {
            let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
            let (word, behind) = rest.split_at(end);
            if let Some((own, value)) = word.split_once('=')
                && plain(own).ends_with(AUTHORIZATION)
                && !value.is_empty()
            {
                result.push_str(own);
                result.push('=');
                let value = &rest[own.len() + 1..];
                rest = &value[push_authorization(result, "=", value)..];
                name.clear();
                continue;
            }
            if !word.is_empty() {
                self.push_word(result, word, &mut name);
            }
            let next = behind.find(is_word).unwrap_or(behind.len());
            let (between, behind) = behind.split_at(next);
            result.push_str(between);
            rest = behind;
            let joins = name == BEARER || word.ends_with('=') || between.contains([':', '=']);
            if !joins || !between.chars().all(|c| " :\"'=\\[|>\r\n".contains(c)) {
                name.clear();
            }
            if is_name(&name) && name != BEARER && behind.is_empty() {
                self.below = match between.trim_end().chars().next_back() {
                    Some('|' | '>') => Some(Below::Block(indent)),
                    Some('[') => Some(Below::List),
                    _ => None,
                };
            }
            if name.ends_with(AUTHORIZATION) {
                rest = &behind[push_authorization(result, between, behind)..];
                name.clear();
            }
        }
    }

    /// Appends a word, or [`REDACTED`] in its place. `name`: the word before, as [`plain`] has it, if the two may be
    /// name and value; replaced by this word.
    fn push_word(&mut self, result: &mut String, word: &str, name: &mut String) {
        // `name=value` is one word.
        if let Some((own, value)) = word.split_once('=')
            && is_name(&plain(own))
            && !value.is_empty()
        {
            result.push_str(own);
            result.push('=');
            result.push_str(REDACTED);
            name.clear();
            return;
        }
        let mut own = plain(word);
        if NAME_OF_PAIR.contains(&name.as_str()) {
            // The value follows behind a key of its own.
            self.named = is_name(&own).then(|| (own.clone(), PAIR_LINES));
            result.push_str(word);
            *name = own;
            return;
        }
        if VALUE_OF_PAIR.contains(&own.as_str())
            && let Some((named, _)) = self.named.take()
        {
            own = named;
            result.push_str(word);
            *name = own;
            return;
        }
        let is_secret = is_name(name) && !is_name(&own);
        // Base64 of `{"`, as each JSON web token begins.
        let is_token = word.starts_with("eyJ") && word.len() > 20;
        result.push_str(if is_secret || is_token { REDACTED } else { word });
        *name = own;
    }
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

/// Appends the value of an `Authorization` header, with which `text` begins, without its credentials; returns its
/// length in `text`, in bytes. `between` is the text before it. If that ends with a quotation mark, the value ends at
/// the next mark like it; otherwise with the list that it is in, with the one word of a scheme of [`SCHEMES`], or with
/// the line.
fn push_authorization(result: &mut String, between: &str, text: &str) -> usize {
    let line = text.find(['\r', '\n']).unwrap_or(text.len());
    let end = match opening(between) {
        // Within JSON that is a text of JSON each mark has as many backslashes before it.
        Some(mark) => closing(&text[..line], mark),
        None => text[..line].find([']', '}', '\'', '"']).filter(|_| !has_parameters(text)).unwrap_or(line),
    };
    let value = &text[..end];
    if value.is_empty() {
        return 0;
    }
    let (scheme, rest) = value.split_once(' ').unwrap_or(("", value));
    let known = plain(scheme);
    let one_word = SCHEMES.contains(&known.as_str());
    if one_word || LONG_SCHEMES.contains(&known.as_str()) {
        result.push_str(scheme);
        result.push(' ');
    }
    result.push_str(REDACTED);
    let word = rest.trim_start().find(|c| !is_word(c)).filter(|_| one_word && opening(between).is_none());
    match word {
        Some(word) => end - rest.trim_start().len() + word,
        None => end,
    }
}

/// Whether parameters follow the scheme, each with its own quotation marks.
fn has_parameters(text: &str) -> bool {
    text.split_once(' ').is_some_and(|(scheme, _)| LONG_SCHEMES.contains(&plain(scheme).as_str()))
}

/// The quotation mark that `between` ends with, and how many backslashes stand before it.
fn opening(between: &str) -> Option<(char, usize)> {
    let mark = between.chars().next_back().filter(|c| ['"', '\''].contains(c))?;
    Some((mark, backslashes(&between[..between.len() - 1])))
}

/// Offset in bytes of the mark that closes the quotation, or of the first backslash before it; the length of `text` if
/// there is none. `escapes`: number of backslashes before the opening mark.
fn closing(text: &str, (mark, escapes): (char, usize)) -> usize {
    let mut marks = text.match_indices(mark).map(|(at, _)| (at, backslashes(&text[..at])));
    marks.find(|(_, before)| *before <= escapes).map_or(text.len(), |(at, before)| at - before)
}

/// Number of backslashes at the end of a text.
fn backslashes(text: &str) -> usize {
    text.len() - text.trim_end_matches('\\').len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str) -> String {
        String::from_utf8(redacted(text.as_bytes())).unwrap()
    }

    #[test]
    fn secrets_are_redacted() {
        for (text, expected) in [
            ("Authorization: Bearer abc.def-1\n", "Authorization: Bearer (left out)\n"),
            ("token: s3cr3t", "token: (left out)"),
            ("Authorization: Basic dXNlcjpwdw==\n", "Authorization: Basic (left out)\n"),
            ("{\"authorization\":\"basic dXNlcjpwdw==\"}", "{\"authorization\":\"basic (left out)\"}"),
            ("Authorization: s3cr3t", "Authorization: (left out)"),
            ("access-token: s3cr3t", "access-token: (left out)"),
            ("--client-secret=s3cr3t -v", "--client-secret=(left out) -v"),
            (
                "{\"clientSecret\":\"s\",\"access_token\":\"t\"}",
                "{\"clientSecret\":\"(left out)\",\"access_token\":\"(left out)\"}",
            ),
            ("GET /x?refresh_token=s3cr3t&a=b", "GET /x?refresh_token=(left out)&a=b"),
            ("{\"password\":\"p\",\"user\":\"u\"}", "{\"password\":\"(left out)\",\"user\":\"u\"}"),
            ("client-key-data=TUlJ", "client-key-data=(left out)"),
            ("saw eyJhbGciOiJSUzI1NiIsImtpZCI6.x.y here", "saw (left out) here"),
            ("Authorization: Negotiate YIIJvwYG", "Authorization: Negotiate (left out)"),
            ("proxy-authorization: NTLM TlRMTVNTUAAB x=1", "proxy-authorization: NTLM (left out) x=1"),
            (
                "Authorization: Digest username=\"u\", nonce=\"n\", response=\"6629fae\"\nHost: a\n",
                "Authorization: Digest (left out)\nHost: a\n",
            ),
            (
                "{\"Authorization\":\"Digest username=\\\"u\\\", response=\\\"66\\\"\",\"Host\":\"a\"}",
                "{\"Authorization\":\"Digest (left out)\",\"Host\":\"a\"}",
            ),
            ("Authorization: token ghp_s3cr3t", "Authorization: token (left out)"),
            (
                "Authorization: AWS4-HMAC-SHA256 Credential=AKIA/20261120, Signature=fe5f80",
                "Authorization: AWS4-HMAC-SHA256 (left out)",
            ),
            ("Authorization: s3cr3t of two words", "Authorization: (left out)"),
            ("authorization=Bearer s3cr3t a=b", "authorization=Bearer (left out) a=b"),
            ("authorization=\"Digest a=\\\"b\\\"\" c=d", "authorization=\"Digest (left out)\" c=d"),
            ("password=\"s3cr3t\" user=u", "password=\"(left out)\" user=u"),
            (
                "curl -H 'Authorization: Bearer s3cr3t' -v https://a/",
                "curl -H 'Authorization: Bearer (left out)' -v https://a/",
            ),
            (
                "map[Authorization:[Bearer s3cr3t] Accept:[json]]",
                "map[Authorization:[Bearer (left out)] Accept:[json]]",
            ),
            (
                "{\"headers\":{\"Authorization\":[\"Negotiate s3cr3t\"],\"Accept\":[\"a\"]}}",
                "{\"headers\":{\"Authorization\":[\"Negotiate (left out)\"],\"Accept\":[\"a\"]}}",
            ),
            (
                "{\\\"authorization\\\":\\\"Bearer s3\\\",\\\"a\\\":1}",
                "{\\\"authorization\\\":\\\"Bearer (left out)\\\",\\\"a\\\":1}",
            ),
            ("x-api-key: s3cr3t", "x-api-key: (left out)"),
            ("X-Api-Key:[s3cr3t]", "X-Api-Key:[(left out)]"),
            ("X-Auth-Token: s3cr3t\r\n", "X-Auth-Token: (left out)\r\n"),
            ("headers: {x-api-key: s3cr3t, accept: json}", "headers: {x-api-key: (left out), accept: json}"),
            (
                "{\"name\":\"X-API-Key\",\"value\":\"s3cr3t\"},{\"name\":\"Host\",\"value\":\"a\"}",
                "{\"name\":\"X-API-Key\",\"value\":\"(left out)\"},{\"name\":\"Host\",\"value\":\"a\"}",
            ),
            (
                "- name: Authorization\n  value: Bearer s3cr3t\n- name: Host\n  value: a\n",
                "- name: Authorization\n  value: Bearer (left out)\n- name: Host\n  value: a\n",
            ),
            (
                "env:\n- name: DB_PASSWORD\n  value: \"s3cr3t\"\n",
                "env:\n- name: DB_PASSWORD\n  value: \"(left out)\"\n",
            ),
            (
                "  token: |\n    s3cr3t\n    more\n  user: u\n",
                "  token: |\n    (left out)\n    (left out)\n  user: u\n",
            ),
            (
                "\"x-api-key\": [\n  \"s3cr3t\"\n],\n\"a\": 1\n",
                "\"x-api-key\": [\n  (left out)\n],\n\"a\": 1\n",
            ),
            ("https://user:pw@192.0.2.1:6443/x", "https://(left out)@192.0.2.1:6443/x"),
            (
                "a\n-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----\nb\n",
                "a\n(left out)\nb\n",
            ),
        ] {
            assert_eq!(shown(text), expected, "{text}");
        }
    }

    #[test]
    fn all_else_stays() {
        for text in [
            "2026-11-22T12:00:00Z  INFO first sync services=3 writes=40\n",
            "https://192.0.2.1:6443/api and user@host\n",
            "{\"value\":\"/etc/kubernetes/proxy.conf\",\"source\":\"file\"}",
            "the token of the service account, eyJ",
            "basic checks: none; the basic rule",
            "- name: web\n  value: 80\n",
            "map[Accept:[json]] [token] x",
            "secret:\n  secretName: web\n",
            "",
        ] {
            assert_eq!(shown(text), text);
        }
    }
}
