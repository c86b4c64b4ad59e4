//! The other end of a veth, even in another network namespace.

use std::io;

use traffic_policy_dataplane::{introspect, node::veth::End, veth_peer};

use super::Finding;

/// Facts about the other end of a veth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OtherEnd {
    name: String,
    /// Whether it has an XDP program in the driver.
    pub(super) xdp: bool,
    /// Whether `veth-peer` has prepared it: the packets it sends have finished checksums.
    pub(super) prepared: bool,
    /// Whether it lies in another network namespace.
    elsewhere: bool,
}

impl OtherEnd {
    /// Inspects the other end of the device.
    ///
    /// # Errors
    /// The device is no veth or no longer exists, or its other end lies where this process may not
    /// look.
    pub(super) fn of(index: u32) -> io::Result<Self> {
        let near = End::of(index)?;
        let far = near.other()?;
        let xdp = far.xdp.filter(|xdp| xdp.driver);
        Ok(Self {
            prepared: xdp.is_some_and(|xdp| veth_peer::is_pass(xdp.id)),
            name: far.name,
            xdp: xdp.is_some(),
            elsewhere: near.other_is_elsewhere(),
        })
    }

    fn described(&self) -> String {
        if self.elsewhere { format!("{} in another network namespace", self.name) } else { self.name.clone() }
    }
}

/// Judges XDP in the driver of a veth: a packet sent back on the veth (XDP_TX) arrives only if the
/// other end has an XDP program, too; GRO there suffices for redirects only (`veth_xdp_flush`,
/// `veth_xdp_xmit` in drivers/net/veth.c).
pub(super) fn judge(name: &str, other: Option<&OtherEnd>) -> Option<Finding> {
    let (found, at) = match other {
        Some(other) if other.xdp => return None,
        Some(other) => (
            format!(
                "{name} is a veth, and its other end ({}) has no XDP program: what XDP sends back by {name} is lost there in silence, every packet to an endpoint on another node among it",
                other.described()
            ),
            other.name.clone(),
        ),
        None => (
            format!(
                "{name} is a veth, and whether its other end has an XDP program could not be seen: if it has none, what XDP sends back by {name} is lost there in silence"
            ),
            "<other end>".to_owned(),
        ),
    };
    Some(Finding::warning(
        "other-end",
        found,
        format!(
            "--attach auto or tc; or at the other end any XDP program in the driver that passes all (`traffic-policy-agent veth-peer --attach {at}` there has one; `ip link set {at} xdpdrv object pass.o section xdp`)"
        ),
    ))
}

/// Describes the other end of a veth, if `veth-peer` has prepared it.
#[must_use]
pub fn prepared_other_end(index: u32) -> Option<String> {
    let other = OtherEnd::of(index).ok()?;
    other.prepared.then(|| other.described())
}

/// Returns the finding that `run` reports for a device with XDP attached in the driver; `None` if
/// it is no veth, or if its other end is fit.
#[must_use]
pub fn lost_at_other_end(device: &str, index: u32) -> Option<Finding> {
    (introspect::driver(device)? == "veth").then(|| judge(device, OtherEnd::of(index).ok().as_ref()))?
}

#[cfg(test)]
impl OtherEnd {
    pub(super) fn for_tests(xdp: bool) -> Self {
        Self { name: "veth7".into(), xdp, prepared: false, elsewhere: true }
    }

    pub(super) fn prepared() -> Self {
        Self { prepared: true, ..Self::for_tests(true) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_there() {
        assert_eq!(judge("eth0", Some(&OtherEnd::for_tests(true))), None);
        let finding = judge("eth0", Some(&OtherEnd::for_tests(false))).unwrap();
        assert!(finding.found.contains("(veth7 in another network namespace) has no XDP program"));
        assert!(finding.found.contains("lost there in silence"));
        let fix = finding.fix.unwrap();
        assert!(
            fix.contains("ip link set veth7 xdpdrv") && fix.contains("veth-peer --attach veth7"),
            "{fix}"
        );
        let finding = judge("eth0", None).unwrap();
        assert!(finding.found.contains("could not be seen") && finding.fix.is_some());
    }
}
