//! The program for frames with a priority tag (IEEE 802.1Q, VLAN 0), to which TC ingress leads.
//!
//! A host treats such a frame as untagged. XDP sees the tag in the frame, unless the network card
//! has removed it; a frame that XDP passes reaches TC with the tag in the packet's metadata. A
//! packet that may concern a Service loses the tag here, so that it leaves without one; all others
//! keep it, because a VLAN device with the number 0 may want it.

use traffic_policy_ebpf::{
    abi::{hook, jump},
    outcome::Outcome,
};

use crate::datapath::{
    ctx::{LINEAR, Packet, tc::Tc},
    family::{V4, V6},
    l3_ingress::may_concern_a_service,
    parse::{ETHERNET, ETHERTYPE_IPV4, ETHERTYPE_IPV6},
    verdict::{self, Decision},
    words::load16,
};

#[inline(always)]
pub fn run(packet: Tc) -> i32 {
    packet.pull(LINEAR);
    verdict::finish(packet, hook::INGRESS, outcome(packet))
}

#[inline(always)]
fn outcome(packet: Tc) -> Decision {
    let data = packet.data();
    if data + ETHERNET > packet.end() {
        return Outcome::PassedNotIp.into();
    }
    let concerns = match load16::<12>(data) {
        ETHERTYPE_IPV4 => may_concern_a_service::<_, V4>(packet),
        ETHERTYPE_IPV6 => may_concern_a_service::<_, V6>(packet),
        _ => Err(Outcome::PassedNotIp),
    };
    if let Err(outcome) = concerns {
        return outcome.into();
    }
    if !packet.untag() {
        return Outcome::DroppedInternalError.into();
    }
    packet.jump::<V4, { jump::WITH_ETHERNET }>();
    Outcome::PassedMissedTailCall.into()
}
