//! Requirements of network drivers before they accept an XDP program: an MTU that is not too large,
//! their own send queues, and offloads that can be switched off. As of Linux 6.1 to 7.0.

use std::fs;

use crate::{dataplane::kernel::Kernel, node::ethtool::Channels};

/// The bytes around a frame in its page: `XDP_PACKET_HEADROOM` before it and
/// `struct skb_shared_info` after it.
const AROUND_A_FRAME: usize = 256 + 320;
const ETHERNET: usize = 14;
/// A VLAN tag and the frame check sequence, for which ena reserves room.
const VLAN_AND_FCS: usize = 8;

/// Returns the largest MTU, in bytes, with which a frame fits into a page of `page` bytes, as most
/// drivers require.
pub fn page_mtu(page: usize) -> u32 {
    u32::try_from(page.saturating_sub(AROUND_A_FRAME + ETHERNET)).unwrap_or(u32::MAX)
}

/// Returns the largest MTU, in bytes, with which a driver accepts our XDP programs, which handle
/// frames of several buffers; `u32::MAX` if there is no limit, `None` if it is not known. `page`:
/// bytes of a memory page.
///
/// The values are from `virtnet_xdp_set`, `veth_xdp_set` and `ENA_XDP_MAX_MTU` in drivers/net.
/// virtio_net supports frames of several buffers in XDP since Linux 6.3; a veth supports them on
/// every supported kernel, with `MAX_SKB_FRAGS` pages and more.
pub fn most_mtu(driver: &str, page: usize, kernel: Kernel) -> Option<u32> {
    match driver {
        "veth" => Some(u32::MAX),
        "virtio_net" if kernel.at_least(6, 3) => Some(u32::MAX),
        "virtio_net" => Some(page_mtu(page)),
        "ena" => Some(page_mtu(page).saturating_sub(VLAN_AND_FCS as u32)),
        _ => None,
    }
}

/// A lack of queues for XDP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooFew {
    /// The largest number of queue pairs in use that would leave enough; 0 if none does.
    pub fit: u32,
    /// The smallest maximum with which the queue pairs in use could stay.
    pub needed: u32,
    /// Whether the driver refuses; otherwise it continues, and its CPUs share send queues under a
    /// lock.
    pub refuses: bool,
}

/// Returns the lack of queues of a driver on a machine with `cpus` possible CPUs, if there is one.
///
/// virtio_net needs a send queue for each CPU in addition to the queue pairs in use
/// (`virtnet_xdp_set`), and reports the lack in the kernel's log only; ena needs as many again as
/// are in use (`ena_xdp_legal_queue_count`).
pub fn too_few_queues(driver: &str, channels: Channels, cpus: u32) -> Option<TooFew> {
    let Channels { used, most } = channels;
    let lack = match driver {
        "virtio_net" => TooFew { fit: most.saturating_sub(cpus), needed: used + cpus, refuses: false },
        "ena" => TooFew { fit: most / 2, needed: 2 * used, refuses: true },
        _ => return None,
    };
    (lack.needed > most).then_some(lack)
}

/// Whether a virtio device has offloads that the driver must switch off for XDP, but cannot,
/// because the hypervisor does not offer it (VIRTIO_NET_F_CTRL_GUEST_OFFLOADS). The driver then
/// refuses with EOPNOTSUPP.
pub fn fixed_guest_offloads(features: u64) -> bool {
    // linux/virtio_net.h
    const CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
    // GUEST_CSUM, GUEST_TSO4, GUEST_TSO6, GUEST_ECN, GUEST_UFO, GUEST_USO4, GUEST_USO6
    const OFFLOADS: u64 = 1 << 1 | 1 << 7 | 1 << 8 | 1 << 9 | 1 << 10 | 1 << 54 | 1 << 55;
    features & CTRL_GUEST_OFFLOADS == 0 && features & OFFLOADS != 0
}

/// The remedy, which lies outside of this machine.
pub const FREE_GUEST_OFFLOADS: &str = "let the hypervisor offer to change them (QEMU: -device virtio-net-pci,ctrl_guest_offloads=on) or switch them off (guest_csum=off,guest_tso4=off,guest_tso6=off,guest_ecn=off,guest_ufo=off)";

/// Returns the features that driver and hypervisor have agreed on; `None` if `driver`, the
/// device's, is another one.
///
/// sysfs shows the devices of the network namespace in which it was mounted, where another device
/// may have this name.
pub fn virtio_features(device: &str, index: u32, driver: Option<&str>) -> Option<u64> {
    let folder = format!("/sys/class/net/{device}");
    let seen = fs::read_to_string(format!("{folder}/ifindex")).ok()?.trim().parse();
    if driver != Some("virtio_net") || seen != Ok(index) {
        return None;
    }
    feature_bits(&fs::read_to_string(format!("{folder}/device/features")).ok()?)
}

/// Parses `1100…`: one digit per feature, starting with number 0.
fn feature_bits(text: &str) -> Option<u64> {
    let digits = text.trim().bytes().take(64).enumerate();
    let mut features = 0;
    for (bit, digit) in digits {
        match digit {
            b'0' => {}
            b'1' => features |= 1 << bit,
            _ => return None,
        }
    }
    Some(features)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtus() {
        let (old, newer) = (Kernel { major: 6, minor: 2 }, Kernel { major: 6, minor: 3 });
        // The figures are those of virtio_net in the kernel's log on x86-64.
        assert_eq!(most_mtu("virtio_net", 4096, old), Some(3506));
        assert_eq!(most_mtu("virtio_net", 65_536, old), Some(64_946));
        assert_eq!(most_mtu("virtio_net", 4096, newer), Some(u32::MAX));
        assert_eq!(most_mtu("veth", 4096, old), Some(u32::MAX));
        assert_eq!(most_mtu("ena", 4096, newer), Some(3498));
        assert_eq!(most_mtu("e1000", 4096, newer), None);
    }

    #[test]
    fn queues() {
        let virtio = |used, most, cpus| too_few_queues("virtio_net", Channels { used, most }, cpus);
        assert_eq!(virtio(2, 4, 2), None);
        assert_eq!(virtio(3, 4, 2), Some(TooFew { fit: 2, needed: 5, refuses: false }));
        assert_eq!(virtio(2, 2, 2), Some(TooFew { fit: 0, needed: 4, refuses: false }));
        assert_eq!(virtio(1, 1, 2), Some(TooFew { fit: 0, needed: 3, refuses: false }));
        let ena = |used, most| too_few_queues("ena", Channels { used, most }, 8);
        assert_eq!(ena(4, 8), None);
        assert_eq!(ena(8, 8), Some(TooFew { fit: 4, needed: 16, refuses: true }));
        assert_eq!(too_few_queues("ixgbe", Channels { used: 8, most: 8 }, 8), None);
    }

    #[test]
    fn guest_offloads() {
        let fixed = |text| fixed_guest_offloads(feature_bits(text).unwrap());
        // Firecracker has GUEST_CSUM, GUEST_TSO4, GUEST_TSO6 and GUEST_UFO, and no means to switch
        // them off.
        assert!(fixed("11000101101110110000000000000100100000000000000000000000000000000000000000000000\n"));
        // QEMU's default is the same with CTRL_GUEST_OFFLOADS.
        assert!(!fixed("11100101111110110000000000000100100000000000000000000000000000000000000000000000"));
        // The host offloads nothing for the guest.
        assert!(!fixed("10000100000000010000000000000100100000000000000000000000000000000000000000000000"));
        assert_eq!(feature_bits("0b11"), None);
        assert_eq!(feature_bits(&"1".repeat(128)), Some(u64::MAX));
    }
}
