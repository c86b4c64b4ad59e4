//! Tests of the packet path's parser: no byte outside a frame is read, and the parser reads what
//! was written.

use proptest::prelude::*;
use traffic_policy_ebpf::{
    abi::{Ports, Tuple},
    outcome::Outcome,
};

use super::frames::{self, Ip4, Ip6, icmp};
use crate::datapath::{
    ctx::Frame,
    family::{V4, V6},
    parse::{
        self, Parse, Parsed,
        icmp_error::ParseIcmpError,
        variable::{ParseVariable, VariableHeaders},
    },
};

const ETHERNET: u32 = 14;

/// Calls everything that a program does with a frame of a family until it knows what the frame is.
fn all<F: ParseVariable + ParseIcmpError>(bytes: &[u8]) {
    let finish = |frame: Frame, parsed: Parsed<F>| {
        if parsed.tcp != 0 && parsed.l4 + 20 > frame.end() {
            return;
        }
        if parse::fixed::finish(frame, &parsed).is_ok() {
            let header = if parsed.tcp != 0 {
                20
            } else if parsed.is_sctp::<Frame>() {
                16
            } else {
                8
            };
            assert!(parsed.l4_offset + header <= parsed.length, "the headers are longer than it");
            assert!((ETHERNET + parsed.length) as usize <= bytes.len(), "it is longer than its frame");
            if parsed.tcp != 0 {
                let _ = (parsed.segment(), parsed.window_scale(frame));
            }
            let _ = (parsed.opens(frame), parsed.ends(frame), parsed.initiate_tag(frame));
        }
    };
    use crate::datapath::ctx::Packet as _;
    Frame::with(bytes, |frame| {
        if let Ok(parsed) = F::parse_fixed(frame) {
            finish(frame, parsed);
        }
        let _ = F::is_icmp_error(frame);
        if let Ok(headers) = F::parse_variable(frame)
            && F::check_options(frame, &headers.parsed).is_ok()
            && headers.later == 0
        {
            finish(frame, headers.parsed);
        }
        if let Ok((parsed, _)) = F::parse_again(frame) {
            finish(frame, parsed);
        }
        if let Ok(error) = F::parse_icmp_error(frame) {
            assert!(error.l4 + 8 <= frame.end() && (ETHERNET + error.length) as usize <= bytes.len());
        }
    });
}

/// The next program finds the same as the one for headers of variable length.
fn read_again<F: ParseVariable<Address: std::fmt::Debug>>(frame: Frame, headers: &VariableHeaders<F>) {
    use crate::datapath::ctx::Packet as _;
    let first = &headers.parsed;
    if headers.later != 0 || first.tuple.protocol == 132 {
        return;
    }
    let Ok((parsed, fragmented)) = F::parse_again(frame) else {
        assert!(first.tuple.protocol == 6 && first.l4 + 20 > frame.end(), "only TCP has to be longer");
        return;
    };
    assert_eq!(fragmented != 0, headers.fragmented != 0);
    assert_eq!((parsed.tuple, parsed.tcp), (first.tuple, u64::from(first.tuple.protocol == 6)));
    assert_eq!((parsed.l4, parsed.l4_offset), (first.l4, first.l4_offset));
    assert_eq!((parsed.length, parsed.ttl), (first.length, first.ttl));
}

fn both(bytes: &[u8]) {
    all::<V4>(bytes);
    all::<V6>(bytes);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes(mut bytes in proptest::collection::vec(any::<u8>(), 14..400), first in any::<u8>(), protocol in prop_oneof![0_u8..64, Just(132)]) {
        if bytes.len() > 23 {
            (bytes[14], bytes[20], bytes[23]) = (first, protocol, protocol);
        }
        both(&bytes);
    }

    #[test]
    fn damaged_ipv4(ip in Ip4::any(), damage in frames::damage()) {
        both(&frames::damaged(ip.bytes(), &damage));
    }

    #[test]
    fn damaged_ipv6(ip in Ip6::any(), damage in frames::damage()) {
        both(&frames::damaged(ip.bytes(), &damage));
    }

    #[test]
    fn damaged_errors(v4 in Ip4::any(), v6 in Ip6::any(), damage in frames::damage(), cut in 0_usize..200) {
        both(&frames::damaged(icmp::about4(&v4, cut), &damage));
        both(&frames::damaged(icmp::about6(&v6, cut), &damage));
    }

    #[test]
    fn ipv4_as_it_was_written(ip in Ip4::any()) {
        let bytes = ip.bytes();
        let fragment = ip.offset != 0 || ip.more;
        Frame::with(&bytes, |frame| {
            let fixed = V4::parse_fixed(frame);
            match (fragment, ip.options.is_empty()) {
                (true, _) => assert_eq!(fixed.err(), Some(Outcome::PassedFragment)),
                (false, true) if ip.protocol == 132 => {
                    assert_eq!(fixed.err(), Some(Outcome::PassedUnsupportedHeader));
                }
                (false, false) => assert_eq!(fixed.err(), Some(Outcome::PassedUnsupportedHeader)),
                (false, true) => assert_eq!(fixed.map(|parsed| parsed.tuple), Ok(ip.tuple(true))),
            }
            let headers = V4::parse_variable(frame).map_err(Outcome::name).expect("a valid packet");
            assert_eq!((headers.fragmented, headers.later), (fragment.into(), (ip.offset != 0).into()));
            assert_eq!(headers.identification, u32::from(ip.identification.to_be()));
            assert_eq!(headers.parsed.tuple, ip.tuple(ip.offset == 0));
            assert_eq!(headers.parsed.l4_offset as usize, 20 + ip.options.len());
            assert_eq!((headers.parsed.length + ETHERNET) as usize, bytes.len());
            assert_eq!(headers.parsed.ttl, ip.ttl);
            read_again(frame, &headers);
        });
    }

    #[test]
    fn ipv6_as_it_was_written(ip in Ip6::any()) {
        let bytes = ip.bytes();
        Frame::with(&bytes, |frame| {
            if ip.extensions.is_empty() && ip.fragment.is_none() && ip.protocol != 132 {
                let fixed = V6::parse_fixed(frame).map(|parsed| parsed.tuple);
                assert_eq!(fixed, Ok(ip.tuple(true)));
            } else {
                assert!(V6::parse_fixed(frame).is_err());
            }
            let headers = V6::parse_variable(frame).map_err(Outcome::name).expect("a valid packet");
            let (offset, more, identification) = ip.fragment.unwrap_or_default();
            let (fragmented, later) = (offset != 0 || more, offset != 0);
            assert_eq!((headers.fragmented, headers.later), (fragmented.into(), later.into()));
            if fragmented {
                assert_eq!(headers.identification, identification.to_be());
            }
            let known = ip.tuple(!later);
            assert_eq!(headers.parsed.tuple, Tuple { protocol: if later { 0 } else { known.protocol }, ..known });
            assert_eq!((headers.parsed.l4_offset + ETHERNET) as usize, bytes.len() - ip.segment.len());
            assert_eq!((headers.parsed.length + ETHERNET) as usize, bytes.len());
            read_again(frame, &headers);
        });
    }

    #[test]
    fn errors_as_they_were_written(v4 in Ip4::any(), v6 in Ip6::any()) {
        let reversed = |ports: Ports| ports.reversed();
        Frame::with(&icmp::about4(&v4, usize::MAX), |frame| {
            let known = v4.tuple(true);
            let error = V4::parse_icmp_error(frame);
            match error {
                Ok(error) => {
                    assert!(v4.offset == 0);
                    assert_eq!(error.tuple.ports, reversed(known.ports));
                    assert_eq!((error.tuple.source, error.tuple.destination), (known.destination, known.source));
                    assert_eq!(error.tuple.protocol, known.protocol);
                }
                Err(outcome) => assert!(v4.offset != 0, "{}", outcome.name()),
            }
        });
        Frame::with(&icmp::about6(&v6, usize::MAX), |frame| {
            let known = v6.tuple(true);
            let later = v6.fragment.is_some_and(|(offset, ..)| offset != 0);
            match V6::parse_icmp_error(frame) {
                Ok(error) => {
                    assert!(!later);
                    assert_eq!(error.tuple.ports, reversed(known.ports));
                    assert_eq!((error.tuple.source, error.tuple.destination), (known.destination, known.source));
                }
                Err(outcome) => assert!(later, "{}", outcome.name()),
            }
        });
    }
}
