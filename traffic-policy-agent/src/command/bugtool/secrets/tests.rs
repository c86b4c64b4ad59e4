//! Secrets in every form in which logs, configurations and answers contain them, and text that is
//! kept.

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
        ("proxy-authorization: NTLM TlRMTVNTUAAB x=1", "proxy-authorization: NTLM (left out)"),
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
        ("-H authorization=Bearer s3cr3t a=b", "-H authorization=Bearer (left out) a=b"),
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
        ("\"x-api-key\": [\n  \"s3cr3t\"\n],\n\"a\": 1\n", "\"x-api-key\": [\n  (left out)\n],\n\"a\": 1\n"),
        ("https://user:pw@192.0.2.1:6443/x", "https://(left out)@192.0.2.1:6443/x"),
        ("a\n-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----\nb\n", "a\n(left out)\nb\n"),
    ] {
        assert_eq!(shown(text), expected, "{text}");
    }
}

/// The last word of a secret may look like the name of one.
#[test]
fn secrets_that_end_like_names() {
    for (text, expected) in [
        ("password: topsecret", "password: (left out)"),
        ("{\"password\":\"SuperSecret\",\"a\":1}", "{\"password\":\"(left out)\",\"a\":1}"),
        ("token: my-token", "token: (left out)"),
        ("--password=topsecret -v", "--password=(left out) -v"),
        ("saw Bearer my-secret here", "saw Bearer (left out) here"),
        ("- name: DB_PASSWORD\n  value: topsecret\n", "- name: DB_PASSWORD\n  value: (left out)\n"),
        // These words are names only with a sign.
        ("Bearer token: s3cr3t", "Bearer token: (left out)"),
        ("Authorization: Bearer my-token", "Authorization: Bearer (left out)"),
    ] {
        assert_eq!(shown(text), expected, "{text}");
    }
}

#[test]
fn blocks_and_lines_below_a_name() {
    for (text, expected) in [
        ("token: |-\n  s3\n  cr3t\nuser: u\n", "token: |-\n  (left out)\n  (left out)\nuser: u\n"),
        ("token: >-\n  s3\n\n  cr3t\nuser: u\n", "token: >-\n  (left out)\n\n  (left out)\nuser: u\n"),
        ("token: |+\n  s3\nuser: u\n", "token: |+\n  (left out)\nuser: u\n"),
        ("token: |2- \n    s3\nuser: u\n", "token: |2- \n    (left out)\nuser: u\n"),
        ("\"token\": >2\r\n  s3\r\nuser: u\r\n", "\"token\": >2\r\n  (left out)\r\nuser: u\r\n"),
        ("token: !!str |-\n  s3\nuser: u\n", "token: (left out)\n  (left out)\nuser: u\n"),
        ("- token: |-\n    s3\n  user: u\n", "- token: |-\n    (left out)\n  user: u\n"),
        ("- token: s3\n  user: u\n", "- token: (left out)\n  user: u\n"),
        ("token: s3\n  cr3t\nuser: u\n", "token: (left out)\n  (left out)\nuser: u\n"),
        ("token: \"s3\n  cr3t\"\nuser: u\n", "token: \"(left out)\n  (left out)\nuser: u\n"),
        ("token:\n  s3\nuser: u\n", "token:\n  (left out)\nuser: u\n"),
        ("token:\n  \"a: b\"\nuser: u\n", "token:\n  (left out)\nuser: u\n"),
        ("token:\n- s3\n- cr3t\nuser: u\n", "token:\n(left out)\n(left out)\nuser: u\n"),
        ("x-api-key: [\"a\",\n  \"b\"]\nuser: u\n", "x-api-key: [\"(left out)\",\n  (left out)\nuser: u\n"),
        ("{\"password\": {\"value\": \"s3\"}}", "{\"password\": {\"value\": \"(left out)\"}}"),
    ] {
        assert_eq!(shown(text), expected, "{text}");
    }
}

/// Signs, blanks and marks within a secret do not end it.
#[test]
fn secrets_are_left_out_to_their_end() {
    for (text, expected) in [
        ("Authorization: Bearer token-abc:SECRET", "Authorization: Bearer (left out)"),
        ("saw Bearer token-abc:SECRET here", "saw Bearer (left out) here"),
        ("Bearer kubeconfig-token:SECRET", "Bearer kubeconfig-token:(left out)"),
        ("token: kubeconfig-u-x:SECRET", "token: (left out)"),
        ("password: pa$$w0rd", "password: (left out)"),
        ("password: two words", "password: (left out)"),
        ("password: \"two words\"", "password: \"(left out)\""),
        ("{\"password\":\"a, \\\"b\\\" c\",\"a\":1}", "{\"password\":\"(left out)\",\"a\":1}"),
        ("{\\\"password\\\":\\\"a b\\\",\\\"a\\\":1}", "{\\\"password\\\":\\\"(left out)\\\",\\\"a\\\":1}"),
        ("password: 'it''s s3cr3t'", "password: '(left out)'"),
        ("password: 'pä$$, ' # so", "password: '(left out)' # so"),
        (
            "\"x-api-key\": [\"a\", \"b]\"], \"c\": 1",
            "\"x-api-key\": [\"(left out)\", \"(left out)\"], \"c\": 1",
        ),
        ("X-Api-Key:[a b] Accept:[json]", "X-Api-Key:[(left out)] Accept:[json]"),
        ("password: [a]b c", "password: [(left out)](left out)"),
        ("password: {a:b", "password: (left out)"),
        ("{token: kube:x, password: a$b}", "{token: (left out), password: (left out)}"),
        ("{\"password\":12.5,\"a\":1}", "{\"password\":(left out),\"a\":1}"),
        ("{Password:a,b User:u} x", "{Password:(left out)} x"),
        ("PASSWORD=two words", "PASSWORD=(left out)"),
        ("Environment=\"PASSWORD=two words\" A=b", "Environment=\"PASSWORD=(left out)\" A=b"),
        ("[\"--token=a:b c\",\"--v=2\"]", "[\"--token=(left out)\",\"--v=2\"]"),
        ("run --token=a:b,c}d] -v", "run --token=(left out) -v"),
        ("\"GET /x?token=a:b&c=d HTTP/1.1\"", "\"GET /x?token=(left out)&c=d HTTP/1.1\""),
        ("password=\"a\"b\" c", "password=\"(left out)\" c"),
        ("password = \"s3\" # so", "password = \"(left out)\" # so"),
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
        "\"secret\": {\"secretName\": \"web\"}",
        "token: \"\"\n",
        "/var/run/secrets/kubernetes.io/serviceaccount/token: No such file or directory (os error 2)\n",
        "it's 6\" of a user's token, isn't it\n",
        "",
    ] {
        assert_eq!(shown(text), text);
    }
}
