//! The programs in the place of SCTP's, as long as this node serves no SCTP. The agent loads SCTP's
//! own, which are a third of what the verifier walks, before it writes the first frontend of SCTP.
//!
//! A packet ends here as it does there if no frontend matches it: most pass, and those to a
//! ClusterIP are answered or dropped. Where there is a frontend nevertheless, XDP leaves its
//! packets to TC, and TC reports that a program is missing.

use traffic_policy_ebpf::{hash, outcome::Outcome};

use crate::datapath::{
    ctx::Packet,
    forward::{Rewrite, fragment},
    lb::Client,
    maps::CONFIG,
    open,
    parse::{fixed, variable::ParseVariable},
    prefilter, reject, slow_path,
    verdict::{self, Decision},
};

/// The program for incoming packets of SCTP.
#[inline(always)]
pub fn run<P: Packet, F: ParseVariable + Rewrite>(packet: P) -> i32 {
    verdict::finish(packet, P::HOOK, incoming::<P, F>(packet))
}

#[inline(always)]
fn incoming<P: Packet, F: ParseVariable + Rewrite>(packet: P) -> Decision {
    if open::was_opened::<P, F>() {
        return open::conclude::<P, F>(Outcome::PassedNotService.into());
    }
    let headers = match F::parse_variable(packet) {
        Ok(headers) => headers,
        Err(outcome) => return outcome.into(),
    };
    if let Err(outcome) = F::check_options(packet, &headers.parsed) {
        return outcome.into();
    }
    if !fragment::note(&headers) {
        return Outcome::DroppedInternalError.into();
    }
    if headers.later != 0 {
        return Outcome::PassedFragment.into();
    }
    let parsed = headers.parsed;
    if !prefilter::may_concern::<F>(&parsed.tuple) {
        return Outcome::Passed.into();
    }
    if !fixed::is_whole(packet, &parsed) {
        return Outcome::PassedMalformed.into();
    }
    let (Some(config), Some(scratch)) = (CONFIG.get_ptr(0), F::scratch()) else {
        return Outcome::DroppedInternalError.into();
    };
    set!(scratch.opening = parsed.tuple);
    let hash = hash::tuple(&parsed.tuple, get!(config.seed));
    let client = Client { source: parsed.tuple.source, netns: 0, of_pod: P::POD, hash };
    match slow_path::list(packet, &parsed, &client) {
        Ok(_) if !P::TC => Outcome::PassedToTc.into(),
        Ok(_) => Outcome::PassedMissedTailCall.into(),
        Err(decision) => reject::if_refused::<P, F>(packet, &parsed, decision),
    }
}
