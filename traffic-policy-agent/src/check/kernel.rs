//! Findings about the kernel (version, BTF, JIT, destroying of sockets) and the capabilities of
//! this process.

use std::path::Path;

use anyhow::Result;
use traffic_policy_dataplane::{
    Kernel, effective_capabilities, introspect, missing_privileges, node::sockets,
};

use super::Finding;

const BTF: &str = "/sys/kernel/btf/vmlinux";

/// Facts about the running kernel.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    kernel: Kernel,
    release: String,
    btf: bool,
    /// Whether programs are compiled; an error if no program could be loaded.
    jit: Result<bool, String>,
    capabilities: u64,
    destroys_sockets: bool,
}

impl Facts {
    pub(super) fn look() -> Result<Self> {
        let (kernel, release) = Kernel::found()?;
        Ok(Self {
            kernel,
            release,
            btf: Path::new(BTF).exists(),
            jit: introspect::jit().map_err(|error| error.to_string()),
            capabilities: effective_capabilities()?,
            destroys_sockets: sockets::supported(),
        })
    }
}

/// Features of newer kernels, each with the version that brought it.
const FEATURES: [((u32, u32), &str); 4] = [
    ((5, 9), "iterators over map elements (sweeping old flows)"),
    ((5, 16), "managed neighbours (next hops that stay resolved)"),
    ((5, 17), "bpf_loop (searching a free source port)"),
    ((6, 1), "all that is tested"),
];

const CAP_SYS_PTRACE: u32 = 19;
const CAP_SYS_ADMIN: u32 = 21;

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let mut findings = vec![version(facts)];
    findings.push(if facts.btf {
        Finding::ok("btf", format!("the kernel describes its types ({BTF})"))
    } else {
        Finding::error(
            "btf",
            format!("the kernel does not describe its types: there is no {BTF}"),
            "use a kernel with CONFIG_DEBUG_INFO_BTF=y (those of the distributions have it), and mount /sys",
        )
    });
    findings.push(match &facts.jit {
        Ok(true) => Finding::ok("bpf-jit", "BPF programs are compiled to machine code"),
        Ok(false) => Finding::warning(
            "bpf-jit",
            "BPF programs are interpreted: each packet costs several times as much",
            "sysctl -w net.core.bpf_jit_enable=1",
        ),
        Err(error) => Finding::error(
            "bpf-jit",
            format!("the kernel loads no BPF program ({error})"),
            "run as root; if it is root already, look at the container's capabilities, seccomp profile and kernel lockdown",
        ),
    });
    findings.push(capabilities(facts.capabilities));
    findings.push(if facts.destroys_sockets {
        Finding::ok("socket-destroy", "the kernel can destroy UDP sockets of endpoints that are gone")
    } else {
        Finding::warning(
            "socket-destroy",
            format!(
                "kernel {} cannot destroy sockets (INET_DIAG_DESTROY): a UDP socket that is connected to an endpoint which is gone stays connected to it",
                facts.release
            ),
            "use a kernel with CONFIG_INET_DIAG_DESTROY=y and CONFIG_INET_UDP_DIAG; without it, restart programs that hold connected UDP sockets for long",
        )
    });
    findings
}

fn version(facts: &Facts) -> Finding {
    let Facts { kernel, release, .. } = facts;
    if !kernel.at_least(6, 1) {
        let lacks = FEATURES.iter().filter(|((major, minor), _)| !kernel.at_least(*major, *minor));
        let lacks: Vec<_> = lacks.map(|(_, what)| *what).collect();
        return Finding::error(
            "kernel",
            format!("Linux {release} is too old; it lacks {}", lacks.join(", ")),
            "use Linux 6.1 or newer",
        );
    }
    if !kernel.has_tcx() {
        return Finding::note(
            "kernel",
            format!(
                "Linux {release} has no links for TC programs (tcx, 6.6): they are attached as filters of clsact, which any `tc qdisc del` takes away"
            ),
            "nothing, or use Linux 6.6 or newer",
        );
    }
    Finding::ok("kernel", format!("Linux {release}"))
}

fn capabilities(effective: u64) -> Finding {
    let missing = missing_privileges(effective);
    if !missing.is_empty() {
        let purposes: Vec<_> =
            missing.iter().map(|(name, purpose)| format!("{name} (to {purpose})")).collect();
        let names: Vec<_> = missing.iter().map(|(name, _)| name.trim_start_matches("CAP_")).collect();
        return Finding::error(
            "capabilities",
            format!("missing: {}", purposes.join(", ")),
            format!(
                "run as root, or in Kubernetes set securityContext.capabilities.add: [{}]",
                names.join(", ")
            ),
        );
    }
    let has = |number: u32| effective >> number & 1 == 1;
    if !has(CAP_SYS_ADMIN) || !has(CAP_SYS_PTRACE) {
        return Finding::note(
            "capabilities",
            "without CAP_SYS_ADMIN and CAP_SYS_PTRACE the agent cannot look into the networks of pods: their UDP sockets that are connected to endpoints which are gone stay",
            "in Kubernetes set securityContext.capabilities.add: [SYS_ADMIN, SYS_PTRACE], too",
        );
    }
    Finding::ok("capabilities", "all that the agent needs")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Severity;

    fn facts() -> Facts {
        Facts {
            kernel: Kernel { major: 6, minor: 18 },
            release: "6.18.1".into(),
            btf: true,
            jit: Ok(true),
            capabilities: u64::MAX,
            destroys_sockets: true,
        }
    }

    /// The one finding that is not ok.
    fn complaint(change: impl FnOnce(&mut Facts)) -> Finding {
        let mut facts = facts();
        change(&mut facts);
        let mut findings = judge(&facts);
        findings.retain(|finding| finding.severity != Severity::Ok);
        assert_eq!(findings.len(), 1, "{findings:?}");
        findings.remove(0)
    }

    #[test]
    fn a_fit_kernel_has_no_complaints() {
        assert!(judge(&facts()).iter().all(|finding| finding.severity == Severity::Ok));
    }

    #[test]
    fn each_lack_is_named_with_its_fix() {
        let old = |major, minor| {
            complaint(|facts| {
                facts.kernel = Kernel { major, minor };
                facts.release = format!("{major}.{minor}.0");
            })
        };
        let finding = old(5, 15);
        assert_eq!(finding.severity, Severity::Error);
        assert!(finding.found.contains("bpf_loop") && finding.found.contains("managed neighbours"));
        assert!(!finding.found.contains("iterators"), "5.15 has them: {}", finding.found);
        assert!(old(5, 4).found.contains("iterators over map elements"));
        let finding = old(6, 1);
        assert_eq!(finding.severity, Severity::Note);
        assert!(finding.found.contains("clsact"));

        let finding = complaint(|facts| facts.btf = false);
        assert!(finding.severity == Severity::Error && finding.fix.unwrap().contains("DEBUG_INFO_BTF"));
        let finding = complaint(|facts| facts.jit = Ok(false));
        assert!(finding.fix.unwrap().contains("bpf_jit_enable"));
        let finding = complaint(|facts| facts.jit = Err("Operation not permitted".into()));
        assert!(finding.severity == Severity::Error && finding.found.contains("not permitted"));
        let finding = complaint(|facts| facts.destroys_sockets = false);
        assert!(finding.found.contains("INET_DIAG_DESTROY") && finding.found.contains("UDP"));
        let finding = complaint(|facts| facts.capabilities = 0);
        assert!(
            finding.severity == Severity::Error && finding.fix.unwrap().contains("[BPF, NET_ADMIN, PERFMON]")
        );
        let finding = complaint(|facts| facts.capabilities &= !(1 << CAP_SYS_ADMIN));
        assert!(finding.severity == Severity::Note && finding.fix.unwrap().contains("SYS_ADMIN"));
    }
}
