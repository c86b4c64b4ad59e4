//! Parsing of addresses as older clusters wrote them: decimal parts may have leading zeros.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;

/// Parses an address as Kubernetes does: `172.30.0.041` is `172.30.0.41` (decimal, never octal),
/// and an IPv4-mapped IPv6 address is an IPv4 address. `None` if the text is not an address.
#[must_use]
pub fn parse_ip(text: &str) -> Option<IpAddr> {
    if text.contains(':') {
        return text.parse::<IpAddr>().ok().map(|ip| ip.to_canonical());
    }
    let mut octets = [0u8; 4];
    let mut parts = text.split('.');
    for octet in &mut octets {
        *octet = parse_decimal(parts.next()?, 255)?.try_into().ok()?;
    }
    parts.next().is_none().then(|| Ipv4Addr::from(octets).into())
}

/// Parses a CIDR as Kubernetes does: surrounding blanks and leading zeros are allowed, host bits
/// are cleared (`203.0.113.001/025` is `203.0.113.0/25`). `None` if the text is not a CIDR.
#[must_use]
pub fn parse_cidr(text: &str) -> Option<IpNet> {
    let (ip, length) = text.trim().split_once('/')?;
    let ip = parse_ip(ip)?;
    let longest = if ip.is_ipv4() { 32 } else { 128 };
    let length = parse_decimal(length, longest)?.try_into().ok()?;
    IpNet::new(ip, length).ok().map(|net| net.trunc())
}

/// Parses digits only; `str::parse` would accept a sign.
fn parse_decimal(text: &str, max: u32) -> Option<u32> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    text.parse().ok().filter(|&value| value <= max)
}

/// Returns the reason why an address can be neither a frontend nor an endpoint; `None` if it can.
#[must_use]
pub fn unusable(ip: IpAddr) -> Option<&'static str> {
    match ip {
        ip if ip.is_unspecified() => Some("the unspecified address"),
        ip if ip.is_loopback() => Some("a loopback address"),
        ip if ip.is_multicast() => Some("a multicast address"),
        IpAddr::V4(ip) if ip.is_broadcast() => Some("the broadcast address"),
        IpAddr::V6(ip) if ip.is_unicast_link_local() => Some("a link-local address"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn leading_zeros_are_decimal() {
        assert_eq!(parse_ip("172.30.0.041"), parse_ip("172.30.0.41"));
        assert_eq!(parse_ip("172.30.0.041"), Some(IpAddr::from([172, 30, 0, 41])));
        assert_eq!(parse_cidr(" 203.0.113.000/025 "), Some("203.0.113.0/25".parse().unwrap()));
        assert_eq!(parse_cidr("203.0.113.200/25"), Some("203.0.113.128/25".parse().unwrap()));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in
            ["", "1.2.3", "1.2.3.4.5", "1.2.3.256", "1.2.3.+4", "1.2.3.", "a.b.c.d", "fe80::1%eth0", "::g"]
        {
            assert_eq!(parse_ip(text), None, "{text}");
        }
        for text in ["1.2.3.4", "1.2.3.4/33", "::/129", "1.2.3.4/", "1.2.3.4/+8", "/8"] {
            assert_eq!(parse_cidr(text), None, "{text}");
        }
    }

    #[test]
    fn mapped_addresses_are_ipv4() {
        assert_eq!(parse_ip("::ffff:192.0.2.1"), Some(IpAddr::from([192, 0, 2, 1])));
    }

    proptest! {
        #[test]
        fn what_std_writes_is_read(ip: IpAddr, length in 0u8..=32) {
            prop_assert_eq!(parse_ip(&ip.to_string()), Some(ip.to_canonical()));
            let net = IpNet::new(ip.to_canonical(), length).unwrap().trunc();
            prop_assert_eq!(parse_cidr(&net.to_string()), Some(net));
        }
    }
}
