//! The entry program of TC ingress on devices without Ethernet: IPIP, GRE, WireGuard, tun.
//!
//! A packet that may concern a Service is given an Ethernet header with empty addresses, and then
//! takes the path of all other packets: it may be sent out by a device with Ethernet, and where the
//! stack takes it, the kernel removes the header again (`sch_handle_ingress`). Everything else
//! passes unchanged.

use traffic_policy_ebpf::{
    abi::{hook, jump},
    outcome::Outcome,
};

use crate::datapath::{
    ctx::{LINEAR, Packet, Skb as _, tc::TcL3},
    family::{V4, V6},
    forward::outer,
    open,
    parse::{ETHERTYPE_IPV4, ETHERTYPE_IPV6, Parse},
    prefilter,
    verdict::{self, Decision},
};

#[inline(always)]
pub fn run(packet: TcL3) -> i32 {
    packet.pull(LINEAR);
    let ethertype = packet.protocol();
    let decision = match ethertype {
        ETHERTYPE_IPV4 => of_family::<V4>(packet, ethertype),
        ETHERTYPE_IPV6 => of_family::<V6>(packet, ethertype),
        _ => Outcome::PassedNotIp.into(),
    };
    verdict::finish(packet, hook::INGRESS, decision)
}

#[inline(always)]
fn of_family<F: Parse>(packet: TcL3, ethertype: u16) -> Decision {
    if let Err(outcome) = may_concern_a_service::<_, F>(packet) {
        return outcome.into();
    }
    if !packet.push_ethernet(ethertype) {
        return Outcome::DroppedInternalError.into();
    }
    // One program serves both families; it checks the EtherType.
    packet.jump::<V4, { jump::WITH_ETHERNET }>();
    Outcome::PassedMissedTailCall.into()
}

/// Whether the packet path has to examine a packet more closely.
///
/// # Errors
/// The packet passes: the outcome of passing.
#[inline(always)]
pub fn may_concern_a_service<P: Packet, F: Parse>(packet: P) -> Result<(), Outcome> {
    match F::parse_fixed(packet) {
        Ok(parsed) if prefilter::may_concern::<F>(&parsed.tuple) => Ok(()),
        Ok(parsed)
            if open::may_be_outer::<P, _>(&parsed.tuple) && outer::is_node::<F>(parsed.tuple.source) =>
        {
            Ok(())
        }
        Ok(_) => Err(Outcome::Passed),
        Err(Outcome::PassedFragment | Outcome::PassedUnsupportedHeader) => Ok(()),
        Err(Outcome::PassedUnsupportedProtocol) if F::is_icmp_error(packet) => Ok(()),
        Err(Outcome::PassedUnsupportedProtocol)
            if F::holds_packet(packet) && outer::is_node::<F>(F::addresses_at(packet.data() + P::L2).0) =>
        {
            Ok(())
        }
        Err(outcome) => Err(outcome),
    }
}
