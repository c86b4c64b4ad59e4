//! Findings about IPsec policies, which a redirect bypasses.

use super::Finding;

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
