//! IPsec policies of this network namespace.

use std::io;

use super::netlink::{Connection, protocols::NETLINK_XFRM};

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
pub fn policies() -> io::Result<usize> {
    let mut xfrm = match Connection::open(NETLINK_XFRM) {
        // The kernel has no IPsec.
        Err(error) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => return Ok(0),
        opened => opened?,
    };
    let messages = xfrm.dump(XFRM_MSG_GETPOLICY, &[0; POLICY_ID])?;
    let leaving = |payload: &[u8]| {
        payload.get(DIRECTION).is_some_and(|dir| matches!(*dir, XFRM_POLICY_OUT | XFRM_POLICY_FORWARD))
    };
    let policies = messages.iter().filter(|message| message.kind == XFRM_MSG_NEWPOLICY);
    Ok(policies.filter(|message| leaving(&message.payload)).count())
}
