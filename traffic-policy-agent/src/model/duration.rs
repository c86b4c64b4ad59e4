//! Durations as Kubernetes users write them.

use std::time::Duration;

/// Parses `30s`, `1m`, `1m30s`, `500ms` or `0`. `None` for anything else.
#[must_use]
pub fn parse_duration(text: &str) -> Option<Duration> {
    let text = text.trim();
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let mut total = Duration::ZERO;
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let number: u64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let letters = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let milliseconds = match &rest[..letters] {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            _ => return None,
        };
        rest = &rest[letters..];
        total = total.checked_add(Duration::from_millis(number.checked_mul(milliseconds)?))?;
    }
    (!text.is_empty()).then_some(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_users_write_them() {
        for (text, seconds) in
            [("30s", 30.0), ("1m", 60.0), ("1m30s", 90.0), ("500ms", 0.5), ("0", 0.0), (" 0s", 0.0)]
        {
            assert_eq!(parse_duration(text), Some(Duration::from_secs_f64(seconds)), "{text}");
        }
        for text in ["", "30", "s", "-1s", "1d", "1.5s", "1s2", "99999999999999999999s", "9999999999999999h"]
        {
            assert_eq!(parse_duration(text), None, "{text}");
        }
    }
}
