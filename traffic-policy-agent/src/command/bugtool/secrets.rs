//! Tokens, keys and passwords within text that is handed on.

/// A blank is enough between it and its token.
const BEARER: &str = "bearer";
/// The same behind [`AUTHORIZATION`]; elsewhere it is a word like others.
const BASIC: &str = "basic";
const AUTHORIZATION: &str = "authorization";
/// In the place of a secret.
const REDACTED: &str = "(left out)";
/// Words behind which a secret stands: `token: x`, `"password":"x"`, `client-key-data=x`, `Bearer x`. In small letters, without
/// signs: `access-token`, `access_token` and `accessToken` are one.
const NAMES: [&str; 17] = [
    AUTHORIZATION,
    BEARER,
    BASIC,
    "token",
    "idtoken",
    "accesstoken",
    "refreshtoken",
    "bearertoken",
    "authtoken",
    "password",
    "passwd",
    "secret",
    "clientsecret",
    "apikey",
    "clientkeydata",
    "clientcertificatedata",
    "certificateauthoritydata",
];

/// A word as [`NAMES`] has it.
fn plain(word: &str) -> String {
    word.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

/// The text without secrets: words that follow the name of one, JSON web tokens, passwords of URLs, blocks of PEM.
pub(super) fn redacted(bytes: &[u8]) -> Vec<u8> {
    let text = String::from_utf8_lossy(bytes);
    let mut result = String::with_capacity(text.len());
    let mut in_block = false;
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
        push_line(&mut result, &without_passwords(line));
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

fn push_line(result: &mut String, line: &str) {
    let mut rest = line;
    // The word before, if nothing but what may stand between a name and its value came since.
    let mut name = String::new();
    while !rest.is_empty() {
        let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        let (word, behind) = rest.split_at(end);
        if !word.is_empty() {
            push_word(result, word, &mut name);
        }
        let next = behind.find(is_word).unwrap_or(behind.len());
        let (between, behind) = behind.split_at(next);
        result.push_str(between);
        let joins = [BEARER, BASIC].contains(&name.as_str()) || between.contains([':', '=']);
        if !joins || !between.chars().all(|c| " :\"'=\\".contains(c)) {
            name.clear();
        }
        rest = behind;
    }
}

/// `name` is that of the word before, and becomes this one's.
fn push_word(result: &mut String, word: &str, name: &mut String) {
    let is_name = |word: &str| NAMES.contains(&word);
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
    if own == BASIC && name != AUTHORIZATION {
        own.clear();
    }
    let is_secret = is_name(name) && !is_name(&own);
    // Base64 of `{"`, as each JSON web token begins.
    let is_token = word.starts_with("eyJ") && word.len() > 20;
    result.push_str(if is_secret || is_token { REDACTED } else { word });
    *name = own;
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
            "",
        ] {
            assert_eq!(shown(text), text);
        }
    }
}
