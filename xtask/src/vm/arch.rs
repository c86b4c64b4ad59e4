//! Architectures that are emulated, and their names in other projects.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Arch {
    #[value(name = "x86_64")]
    X86_64,
    #[value(name = "aarch64")]
    Aarch64,
}

impl Arch {
    /// Returns the architecture of this machine; `None` if it is another one.
    pub(crate) fn of_host() -> Option<Self> {
        match std::env::consts::ARCH {
            "x86_64" => Some(Self::X86_64),
            "aarch64" => Some(Self::Aarch64),
            _ => None,
        }
    }

    /// Returns the name in Debian.
    pub(super) const fn debian(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Aarch64 => "arm64",
        }
    }

    /// Returns the name in rustc.
    pub(crate) const fn target(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64-unknown-linux-gnu",
            Self::Aarch64 => "aarch64-unknown-linux-gnu",
        }
    }

    /// Returns the name in OCI, which is Go's.
    pub(crate) const fn oci(self) -> &'static str {
        self.debian()
    }

    pub(super) const fn qemu(self) -> &'static str {
        match self {
            Self::X86_64 => "qemu-system-x86_64",
            Self::Aarch64 => "qemu-system-aarch64",
        }
    }

    /// Returns Debian's package with [`Self::qemu`].
    pub(super) const fn qemu_package(self) -> &'static str {
        match self {
            Self::X86_64 => "qemu-system-x86",
            Self::Aarch64 => "qemu-system-arm",
        }
    }

    /// Returns the arguments for board and processor.
    pub(super) const fn machine(self) -> &'static [&'static str] {
        match self {
            // qemu 7.2 occasionally emulates cmpxchg16b wrongly: a guest died of a double fault
            // after it.
            Self::X86_64 => &["-machine", "q35", "-cpu", "max,-cx16"],
            // Pointer authentication takes most of the time of an emulated processor, and is not
            // under test.
            Self::Aarch64 => &["-machine", "virt", "-cpu", "max,pauth-impdef=on"],
        }
    }

    /// Whether this machine can run such guests with KVM. The device alone is not sufficient: some
    /// virtual machines have it, but their guests never execute an instruction.
    pub(super) fn has_kvm(self) -> bool {
        let device = std::fs::File::options().read(true).write(true).open("/dev/kvm").is_ok();
        device && Self::of_host() == Some(self) && (self == Self::Aarch64 || has_virtualisation())
    }

    pub(super) const fn console(self) -> &'static str {
        match self {
            Self::X86_64 => "ttyS0",
            Self::Aarch64 => "ttyAMA0",
        }
    }
}

/// Whether the processor has VMX (Intel) or SVM (AMD).
fn has_virtualisation() -> bool {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    info.lines().any(|line| {
        line.starts_with("flags") && line.split_whitespace().any(|flag| flag == "vmx" || flag == "svm")
    })
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
        })
    }
}
