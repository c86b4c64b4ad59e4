//! A neighbour as the address of a packet socket.

use std::io;

use socket2::SockAddr;

/// Returns the address by which a packet socket sends packets of a protocol (of ETH_P_*, host
/// order) to the MAC address of a neighbour at a device, or receives its packets: then the MAC
/// address does not count.
///
/// # Errors
/// The device's number is beyond those of the kernel.
pub fn of(link: u32, mac: [u8; 6], protocol: u16) -> io::Result<SockAddr> {
    let index = i32::try_from(link).map_err(io::Error::other)?;
    // SAFETY: the storage is large enough for a sockaddr_ll, which is all that is written, and the
    // rest is zero.
    let ((), address) = unsafe {
        SockAddr::try_init(|storage, length| {
            let address = storage.cast::<libc::sockaddr_ll>();
            (*address).sll_family = libc::AF_PACKET as libc::sa_family_t;
            (*address).sll_protocol = protocol.to_be();
            (*address).sll_ifindex = index;
            (*address).sll_halen = mac.len() as u8;
            (&mut (*address).sll_addr)[..mac.len()].copy_from_slice(&mac);
            *length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
            Ok(())
        })
    }?;
    Ok(address)
}
