//! Findings about IPsec policies, which a redirect bypasses.

use std::io;

use traffic_policy_dataplane::node::netlink::{Connection, protocols::NETLINK_XFRM};

use super::Finding;

// linux/xfrm.h
const XFRM_MSG_GETPOLICY: u16 = 0x15;
const XFRM_MSG_NEWPOLICY: u16 = 0x13;
/// Length of `struct xfrm_userpolicy_id`.
const POLICY_ID: usize = 64;
/// Offset of `xfrm_userpolicy_info.dir`, behind selector (56), lifetimes (64 + 32), priority and
/// index (8).
const DIRECTION: usize = 160;
const XFRM_POLICY_FORWARD: u8 = 2;
const XFRM_POLICY_OUT: u8 = 1;

/// Returns the number of policies for sent or forwarded packets in this network namespace.
pub(super) fn policies() -> anyhow::Result<usize> {
    let mut xfrm = match Connection::open(NETLINK_XFRM) {
        // The kernel has no IPsec.
        Err(error) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => return Ok(0),
        opened => opened?,
    };
    let messages = match xfrm.dump(XFRM_MSG_GETPOLICY, &[0; POLICY_ID]) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => return Err(error.into()),
        dumped => dumped?,
    };
    let leaving = |payload: &[u8]| {
        payload.get(DIRECTION).is_some_and(|dir| matches!(*dir, XFRM_POLICY_OUT | XFRM_POLICY_FORWARD))
    };
    let policies = messages.iter().filter(|message| message.kind == XFRM_MSG_NEWPOLICY);
    Ok(policies.filter(|message| leaving(&message.payload)).count())
}

pub(super) fn judge(policies: &usize) -> Vec<Finding> {
    const PROBE: &str = "ipsec";
    vec![match policies {
        0 => Finding::ok(PROBE, "no IPsec policy asks for what is sent on to be encrypted"),
        policies => Finding::warning(
            PROBE,
            format!(
                "there are {policies} IPsec policies (ip xfrm policy): what is sent on to endpoints of other nodes is redirected past them, unencrypted"
            ),
            "let the network plugin encrypt by WireGuard below VXLAN, or between gateways outside of this node",
        ),
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Severity;

    #[test]
    fn policies_are_passed_by() {
        assert_eq!(judge(&0)[0].severity, Severity::Ok);
        let [finding] = judge(&2).try_into().unwrap();
        assert_eq!(finding.severity, Severity::Warning);
        assert!(finding.found.starts_with("there are 2 IPsec policies"), "{finding:?}");
    }
}
