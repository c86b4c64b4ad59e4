//! Architectures that are emulated, and the names that others have for them.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Arch {
    #[value(name = "x86_64")]
    X86_64,
    #[value(name = "aarch64")]
    Aarch64,
}

impl Arch {
    /// Of this machine; `None` where it is another.
    pub(crate) fn of_host() -> Option<Self> {
        match std::env::consts::ARCH {
            "x86_64" => Some(Self::X86_64),
            "aarch64" => Some(Self::Aarch64),
            _ => None,
        }
    }

    /// As Debian says.
    pub(super) const fn debian(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Aarch64 => "arm64",
        }
    }

    /// As rustc says.
    pub(crate) const fn target(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64-unknown-linux-gnu",
            Self::Aarch64 => "aarch64-unknown-linux-gnu",
        }
    }

    /// As OCI says, which is as Go does.
    pub(crate) const fn oci(self) -> &'static str {
        self.debian()
    }

    pub(super) const fn qemu(self) -> &'static str {
        match self {
            Self::X86_64 => "qemu-system-x86_64",
            Self::Aarch64 => "qemu-system-aarch64",
        }
    }

    /// Debian's package with [`Self::qemu`].
    pub(super) const fn qemu_package(self) -> &'static str {
        match self {
            Self::X86_64 => "qemu-system-x86",
            Self::Aarch64 => "qemu-system-arm",
        }
    }

    /// Board and processor.
    pub(super) const fn machine(self) -> &'static [&'static str] {
        match self {
            // qemu 7.2 emulates cmpxchg16b wrongly once in a while: a guest died of a double fault after it.
            Self::X86_64 => &["-machine", "q35", "-cpu", "max,-cx16"],
            // Pointer authentication takes most of the time of an emulated processor, and is not what is tested.
            Self::Aarch64 => &["-machine", "virt", "-cpu", "max,pauth-impdef=on"],
        }
    }

    /// Whether this machine runs such guests itself. The device alone says little: some virtual machines have it, and then
    /// their guests never execute an instruction.
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

/// VMX (Intel) or SVM (AMD).
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
