//! Explanations of errors on attaching XDP: the kernel's error number, the likely cause and the
//! remedy.

use aya::programs::ProgramError;

use super::{
    super::error::{chain, errno, kernel_words},
    drivers,
};
use crate::dataplane::kernel::Kernel;

/// The facts about a device that refuses XDP.
#[derive(Clone, Debug)]
pub struct Refusing<'a> {
    pub name: &'a str,
    pub driver: Option<&'a str>,
    pub mtu: u32,
    /// The size of a memory page, in bytes.
    pub page: usize,
    pub kernel: Kernel,
    /// The features of a virtio device, see [`drivers::virtio_features`].
    pub virtio: Option<u64>,
    /// Whether XDP in the stack was requested, rather than in the driver.
    pub generic: bool,
}

impl Refusing<'_> {
    /// Returns the meaning of the kernel's error for this device, and the remedy.
    pub fn explain(&self, error: &ProgramError) -> String {
        let text = chain(error);
        match errno(error) {
            Some(errno) => self
                .cause(errno, kernel_words(error).as_deref())
                .unwrap_or_else(|| format!("attaching XDP to {} failed: {text}", self.name)),
            None => format!("attaching XDP to {} failed: {text}", self.name),
        }
    }

    /// Returns the cause and the remedy of an error number. `words`: the kernel's own message, if
    /// there was one.
    fn cause(&self, errno: i32, words: Option<&str>) -> Option<String> {
        let name = self.name;
        let number = words.map_or_else(
            || format!("error {errno}"),
            |words| format!("error {errno}, of which the kernel says \"{words}\""),
        );
        let instead = if self.generic {
            "run with --attach tc"
        } else {
            "run with --attach tc, or --attach xdp-generic"
        };
        let driver = self.driver.map_or_else(String::new, |driver| format!(" ({driver})"));
        Some(match errno {
            // The error is EBUSY for a program of the same mode, EEXIST for one of the other.
            libc::EBUSY | libc::EEXIST => format!(
                "another XDP program is on {name}: detach it (`ip link show {name}`, `ip link set {name} xdp off`), or run with --attach tc"
            ),
            libc::EOPNOTSUPP if self.virtio.is_some_and(drivers::fixed_guest_offloads) => format!(
                "{name}{driver} refuses XDP ({number}), for the host hands it merged or unfinished frames (guest offloads) and does not let that be changed: {}; or {instead}",
                drivers::FREE_GUEST_OFFLOADS
            ),
            libc::EOPNOTSUPP => format!(
                "the driver of {name}{driver} has no XDP, or none with the offloads that are on ({number}): {instead}"
            ),
            libc::EINVAL | libc::ERANGE if self.too_long().is_some() => {
                let most = self.too_long().unwrap_or_default();
                format!(
                    "{name}{driver} has MTU {}, and its driver takes XDP up to {most} ({number}): `ip link set {name} mtu {most}`, or {instead}",
                    self.mtu
                )
            }
            libc::EINVAL | libc::ERANGE => format!(
                "{name}{driver} does not take XDP as it is set up ({number}), most likely for its MTU of {} or its number of queues: lower them (`ip link set {name} mtu 1500`, `ethtool -L {name} combined N`; `dmesg` may tell more), or {instead}",
                self.mtu
            ),
            libc::ENOSPC if self.driver == Some("veth") => format!(
                "{name} (veth) has fewer receive queues than its other end has send queues ({number}): `ethtool -L {name} rx N`, or {instead}"
            ),
            libc::ENOTCONN if self.driver == Some("veth") => {
                format!("{name} (veth) has no other end ({number}): make the pair anew, or {instead}")
            }
            libc::ENOMEM => format!(
                "there is too little memory, or {name}{driver} has too few queues, for XDP ({number}): `ethtool -L {name} combined N` with a smaller N, or {instead}"
            ),
            libc::ENODEV => format!("{name} is gone ({number})"),
            libc::EPERM => format!(
                "attaching XDP to {name} is not permitted ({number}): run as root, or with CAP_NET_ADMIN and CAP_BPF"
            ),
            _ => return words.map(|_| format!("{name}{driver} refuses XDP ({number}): {instead}")),
        })
    }

    /// Returns the largest MTU, if the device's is larger.
    fn too_long(&self) -> Option<u32> {
        let most = drivers::most_mtu(self.driver?, self.page, self.kernel)?;
        (self.mtu > most && !self.generic).then_some(most)
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use aya::sys::SyscallError;

    use super::*;

    const PLAIN: Refusing<'_> = Refusing {
        name: "eth0",
        driver: Some("igb"),
        mtu: 1500,
        page: 4096,
        kernel: Kernel { major: 6, minor: 1 },
        virtio: None,
        generic: false,
    };
    const FIXED: Option<u64> = Some(1 << 1 | 1 << 7);

    fn error(errno: i32) -> ProgramError {
        let io_error = io::Error::from_raw_os_error(errno);
        SyscallError { call: "bpf_link_create", io_error }.into()
    }

    #[test]
    fn each_number_has_its_cause_and_fix() {
        let virtio = Refusing { driver: Some("virtio_net"), ..PLAIN };
        let veth = Refusing { driver: Some("veth"), ..PLAIN };
        let rows: [(&Refusing<'_>, i32, &[&str]); 13] = [
            (&PLAIN, libc::EBUSY, &["another XDP program is on eth0", "--attach tc"]),
            (&PLAIN, libc::EEXIST, &["another XDP program is on eth0", "xdp off"]),
            (
                &PLAIN,
                libc::EOPNOTSUPP,
                &["the driver of eth0 (igb) has no XDP", "error 95", "--attach xdp-generic"],
            ),
            (
                &Refusing { virtio: FIXED, ..virtio.clone() },
                libc::EOPNOTSUPP,
                &["guest offloads", "error 95", "ctrl_guest_offloads=on"],
            ),
            (&Refusing { virtio: Some(0), ..virtio.clone() }, libc::EOPNOTSUPP, &["has no XDP"]),
            (
                &Refusing { mtu: 9000, ..virtio.clone() },
                libc::EINVAL,
                &["MTU 9000", "up to 3506", "error 22", "mtu 3506"],
            ),
            (&virtio, libc::EINVAL, &["as it is set up", "1500", "ethtool -L eth0"]),
            (&Refusing { mtu: 9000, ..PLAIN }, libc::ERANGE, &["as it is set up", "9000", "error 34"]),
            (&veth, libc::ENOSPC, &["fewer receive queues", "ethtool -L eth0 rx N"]),
            (&veth, libc::ENOTCONN, &["no other end"]),
            (&PLAIN, libc::ENOMEM, &["too little memory", "too few queues", "error 12"]),
            (&PLAIN, libc::EPERM, &["CAP_NET_ADMIN"]),
            (&PLAIN, libc::ENODEV, &["eth0 is gone"]),
        ];
        for (device, errno, parts) in rows {
            let text = device.explain(&error(errno));
            for part in parts {
                assert!(text.contains(part), "{errno}: no {part:?} in {text}");
            }
            assert!(errno == libc::EOPNOTSUPP || !text.contains("no XDP"), "{errno}: {text}");
        }
        let generic = Refusing { generic: true, ..PLAIN };
        assert!(!generic.explain(&error(libc::EOPNOTSUPP)).contains("xdp-generic"));
        // An unknown error number is reported as it is.
        assert_eq!(
            PLAIN.explain(&error(libc::EXDEV)),
            "attaching XDP to eth0 failed: `bpf_link_create` failed: Invalid cross-device link (os error 18)"
        );
    }

    #[test]
    fn numbers_are_read_and_not_texts() {
        let text = ProgramError::InvalidName { name: "os error 16".to_owned() };
        assert_eq!(errno(&text), None);
        assert!(
            PLAIN.explain(&text).starts_with("attaching XDP to eth0 failed: the program name `os error 16`")
        );
        assert_eq!(errno(&error(libc::EINVAL)), Some(libc::EINVAL));
        assert_eq!(errno(&io::Error::from_raw_os_error(libc::EBUSY).into()), Some(libc::EBUSY));
    }

    /// The format in which aya shows the kernel's netlink message.
    #[test]
    fn the_kernels_own_words() {
        #[derive(Debug, thiserror::Error)]
        #[error("netlink error: [\"virtio_net: MTU too large to enable XDP without frags\"]")]
        struct Netlink(#[source] io::Error);
        let error = Netlink(io::Error::from_raw_os_error(libc::EINVAL));
        let words = kernel_words(&error);
        assert_eq!(words.as_deref(), Some("virtio_net: MTU too large to enable XDP without frags"));
        let text = PLAIN.cause(libc::EINVAL, words.as_deref()).unwrap();
        assert!(text.contains("error 22, of which the kernel says \"virtio_net: MTU too large"), "{text}");
        // No message is invented.
        assert_eq!(kernel_words(&self::error(libc::EINVAL)), None);
        assert_eq!(kernel_words(&io::Error::other("netlink error: []")), None);
    }
}
