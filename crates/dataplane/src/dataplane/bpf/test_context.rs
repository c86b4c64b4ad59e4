//! Contexts of BPF_PROG_TEST_RUN: the input of a program in addition to the packet.

/// Returns the `struct xdp_md` of a frame of `length` bytes that arrived on a device: `data_end` at
/// 4, `ingress_ifindex` at 12.
#[must_use]
pub fn xdp_md(length: u32, ifindex: u32) -> [u8; 24] {
    let mut context = [0; 24];
    context[4..8].copy_from_slice(&length.to_ne_bytes());
    context[12..16].copy_from_slice(&ifindex.to_ne_bytes());
    context
}

/// Returns the `struct __sk_buff` of a packet on a device: `ifindex` at 40, `gso_size` at 176, in
/// bytes; 0 if the packet is not segmented later.
#[must_use]
pub fn sk_buff(ifindex: u32, gso_size: u32) -> [u8; 192] {
    let mut context = [0; 192];
    context[40..44].copy_from_slice(&ifindex.to_ne_bytes());
    context[176..180].copy_from_slice(&gso_size.to_ne_bytes());
    context
}
