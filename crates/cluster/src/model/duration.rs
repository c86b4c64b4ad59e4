//! Durations as Kubernetes users write them, in the syntax of Go's `time.ParseDuration`.

use std::time::Duration;

/// The longest duration in nanoseconds: 584 years, twice as much as Go can represent.
const LONGEST: u128 = u64::MAX as u128;

/// Parses `30s`, `1m30s`, `1.5h`, `.5s`, `+500ms` or `0`. `None` for anything else and for negative
/// durations.
#[must_use]
pub fn parse_duration(text: &str) -> Option<Duration> {
    let text = text.trim();
    let (negative, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    if rest == "0" {
        return Some(Duration::ZERO);
    }
    if rest.is_empty() {
        return None;
    }
    let mut total = 0_u128;
    while !rest.is_empty() {
        let (whole, behind) = digits(rest);
        let (part, behind) = behind.strip_prefix('.').map_or(("", behind), digits);
        if whole.is_empty() && part.is_empty() {
            return None;
        }
        let end = behind.find(|c: char| c == '.' || c.is_ascii_digit()).unwrap_or(behind.len());
        let (unit, behind) = behind.split_at(end);
        let unit = nanoseconds(unit)?;
        let whole: u128 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
        // Fractions of a nanosecond are cut off, whatever the unit.
        let part = &part[..part.len().min(18)];
        let part = part.parse::<u128>().map_or(0, |number| number * unit / 10_u128.pow(part.len() as u32));
        total = total.checked_add(whole.checked_mul(unit)?)?.checked_add(part)?;
        if total > LONGEST {
            return None;
        }
        rest = behind;
    }
    (!negative || total == 0).then(|| Duration::from_nanos(u64::try_from(total).unwrap_or(u64::MAX)))
}

/// Splits a text into its leading digits and the rest.
fn digits(text: &str) -> (&str, &str) {
    text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()))
}

const fn nanoseconds(unit: &str) -> Option<u128> {
    Some(match unit.as_bytes() {
        b"ns" => 1,
        // Both the micro sign and the Greek letter mu are accepted.
        b"us" | b"\xc2\xb5s" | b"\xce\xbcs" => 1_000,
        b"ms" => 1_000_000,
        b"s" => 1_000_000_000,
        b"m" => 60_000_000_000,
        b"h" => 3_600_000_000_000,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_users_write_them() {
        for (text, nanoseconds) in [
            ("30s", 30_000_000_000),
            ("1m", 60_000_000_000),
            ("1m30s", 90_000_000_000),
            ("500ms", 500_000_000),
            ("0", 0),
            (" 0s", 0),
            ("-0", 0),
            ("-0s", 0),
            ("1.5h", 5_400_000_000_000),
            ("1h0.5m", 3_630_000_000_000),
            ("+5s", 5_000_000_000),
            (".5s", 500_000_000),
            ("5.s", 5_000_000_000),
            ("24h0m0s", 86_400_000_000_000),
            ("1s1s", 2_000_000_000),
            ("7us8µs9μs10ns", 24_010),
            ("0.100000000000000000000h", 360_000_000_000),
            ("0.3333333333333333333h", 1_200_000_000_000 - 1),
            ("18446744073709551615ns", u64::MAX),
        ] {
            assert_eq!(parse_duration(text), Some(Duration::from_nanos(nanoseconds)), "{text}");
        }
        for text in [
            "",
            "30",
            "+",
            "-",
            ".",
            ".s",
            "s",
            "+.s",
            "-1s",
            "1d",
            "1s2",
            "1.5.5s",
            "1 s",
            "1S",
            "1e3s",
            "--5s",
            "18446744073709551616ns",
            "99999999999999999999s",
            "9999999999999h",
        ] {
            assert_eq!(parse_duration(text), None, "{text}");
        }
    }
}
