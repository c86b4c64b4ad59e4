//! Findings of the verifier: all programs are loaded with maps of their own, and attached nowhere.

use anyhow::Result;
use traffic_policy_dataplane::{Kernel, Refusal, check_privileges, try_programs};

use super::Finding;

/// Facts about BPF programs on the node.
#[derive(Clone, Debug)]
pub(super) enum Facts {
    /// The programs passed the verifier.
    Verified {
        release: String,
        programs: usize,
    },
    Refused(Refusal),
    /// No program could be checked: maps could not be created, or memory is short.
    Failed(String),
}

impl Facts {
    pub(super) fn look() -> Result<Self> {
        // Without privileges the kernel refuses every program.
        check_privileges()?;
        let (kernel, release) = Kernel::found()?;
        Ok(match try_programs(&kernel) {
            Ok(programs) => Self::Verified { release, programs },
            Err(error) => match error.downcast::<Refusal>() {
                Ok(refusal) => Self::Refused(refusal),
                Err(error) => Self::Failed(format!("{error:#}")),
            },
        })
    }
}

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    const PROBE: &str = "programs";
    vec![match facts {
        Facts::Verified { release, programs } => {
            Finding::ok(PROBE, format!("the verifier of Linux {release} takes all {programs} programs"))
        }
        Facts::Refused(refusal) => Finding::error(PROBE, refusal.to_string(), Refusal::FIX),
        Facts::Failed(error) => Finding::error(
            PROBE,
            format!("the programs cannot be loaded: {error}"),
            "mend that: `run` would end with the same error",
        ),
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Severity;

    #[test]
    fn what_run_would_meet() {
        let one = |facts| {
            let [finding] = judge(&facts).try_into().unwrap();
            finding
        };
        let finding = one(Facts::Verified { release: "6.12.94".into(), programs: 40 });
        assert_eq!(finding.severity, Severity::Ok);
        assert_eq!(finding.found, "the verifier of Linux 6.12.94 takes all 40 programs");

        let refusal = Refusal {
            release: "6.12.94".into(),
            program: "tp_xdp_reject4".into(),
            reason: "R6 unbounded memory access".into(),
            log: Ok("/tmp/traffic-policy-verifier-tp_xdp_reject4.log".into()),
            refused: 4,
            all: 40,
        };
        let finding = one(Facts::Refused(refusal.clone()));
        assert_eq!(finding.severity, Severity::Error);
        assert_eq!(
            finding.found,
            "Linux 6.12.94 refuses 4 of the packet path's 40 programs; the first is tp_xdp_reject4, of which the kernel's verifier says: R6 unbounded memory access (its whole log is in /tmp/traffic-policy-verifier-tp_xdp_reject4.log)"
        );
        assert!(finding.fix.unwrap().contains("a kernel of the table"));
        let finding = one(Facts::Refused(Refusal { log: Err("no space left".into()), ..refusal }));
        assert!(finding.found.ends_with("(its whole log could not be kept: no space left)"));

        let finding = one(Facts::Failed("Cannot allocate memory (os error 12)".into()));
        assert_eq!(finding.severity, Severity::Error);
        assert!(finding.found.contains("allocate") && !finding.found.contains("verifier"));
    }
}
