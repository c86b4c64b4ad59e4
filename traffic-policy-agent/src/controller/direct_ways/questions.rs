//! The questions to other nodes, each in all ways at once.

use std::io;

use traffic_policy_cluster::model::{DirectTarget, Passing, Way};
use traffic_policy_dataplane::node::{
    Answered, ProbeWay,
    direct_probe::{self, Question},
};

/// Asks nodes by these packets, and returns the way to each. Blocks for up to a second.
///
/// # Errors
/// No packet can be sent, or no answer be seen.
pub(super) fn ask(targets: &[DirectTarget]) -> io::Result<Vec<Way>> {
    let mut questions = Vec::new();
    let mut numbers = Vec::new();
    for (number, target) in targets.iter().enumerate() {
        for (way, of) in ProbeWay::WITHIN.into_iter().enumerate() {
            match Question::new(target, of, None, |_| true) {
                Ok(question) => {
                    questions.push(question);
                    numbers.push((number, way));
                }
                Err(error) if lacks_route(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }
    let answers = direct_probe::ask(&questions)?;
    let mut ways = vec![[Answered::No; ProbeWay::WITHIN.len()]; targets.len()];
    for ((number, way), answered) in numbers.into_iter().zip(answers) {
        ways[number][way] = answered.unwrap_or(Answered::No);
    }
    Ok(ways.into_iter().map(way).collect())
}

/// Returns the way that answers to [`ProbeWay::WITHIN`] show.
fn way([ip, udp, back_ip, back_udp]: [Answered; 4]) -> Way {
    let (any, back) = (|answered| answered != Answered::No, |answered| answered == Answered::Within);
    Way {
        direct: Passing { within_ip: any(ip), within_udp: any(udp) },
        tunnel: Passing { within_ip: back(back_ip), within_udp: back(back_udp) },
    }
}

/// Whether nothing can get there from this node.
fn lacks_route(error: &io::Error) -> bool {
    use io::ErrorKind::{AddrNotAvailable, HostUnreachable, NetworkUnreachable};
    matches!(error.kind(), AddrNotAvailable | HostUnreachable | NetworkUnreachable)
}

/// Whether it is this process that may not ask: see socket(2).
pub(super) fn are_refused(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied || error.raw_os_error() == Some(libc::EAFNOSUPPORT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_show_the_way() {
        use Answered::{AsItIs, No, Within};
        let [ip, udp] =
            [(true, false), (false, true)].map(|(within_ip, within_udp)| Passing { within_ip, within_udp });
        for (answers, direct, tunnel) in [
            ([AsItIs, AsItIs, Within, Within], Passing::ALL, Passing::ALL),
            ([No, AsItIs, No, Within], udp, udp),
            ([AsItIs, No, Within, No], ip, ip),
            ([No, No, Within, Within], Passing::NONE, Passing::ALL),
            // An agent of a former version answers the client itself.
            ([AsItIs, No, AsItIs, No], ip, Passing::NONE),
            ([No; 4], Passing::NONE, Passing::NONE),
        ] {
            assert_eq!(way(answers), Way { direct, tunnel }, "{answers:?}");
        }
    }
}
