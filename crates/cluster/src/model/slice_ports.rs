//! The slices of one Service by port, so that each port finds its own without scanning those of all
//! others.

use std::{collections::HashMap, net::SocketAddr};

use super::{
    Protocol,
    object::{EndpointSlice, Port, SliceEndpoint},
};

/// A slice that has a port, and the port's number in it.
type Numbered<'a> = (&'a EndpointSlice, u16);

/// Slices by family, name and protocol of a port, but not by number: slices of one Service may give
/// different ones.
#[derive(Debug)]
pub(super) struct SlicePorts<'a>(HashMap<(bool, &'a str, Protocol), Vec<Numbered<'a>>>);

impl<'a> SlicePorts<'a> {
    pub(super) fn new(slices: &[&'a EndpointSlice]) -> Self {
        let mut ports: HashMap<_, Vec<_>> = HashMap::new();
        for slice in slices {
            for port in &slice.ports {
                let key = (slice.ipv6, port.name.as_str(), port.protocol);
                ports.entry(key).or_default().push((*slice, port.port));
            }
        }
        Self(ports)
    }

    fn of<'b>(&'b self, port: &'b Port, ipv6: bool) -> &'b [Numbered<'a>] {
        self.0.get(&(ipv6, port.name.as_str(), port.protocol)).map_or(&[], Vec::as_slice)
    }

    /// Returns the endpoints of one port and family in the order of the slices. An endpoint in
    /// several slices is returned several times.
    pub(super) fn endpoints<'b>(
        &'b self,
        port: &'b Port,
        ipv6: bool,
    ) -> impl Iterator<Item = (SocketAddr, &'a SliceEndpoint)> + use<'a, 'b> {
        self.of(port, ipv6).iter().flat_map(|&(slice, number)| {
            slice.endpoints.iter().map(move |endpoint| (SocketAddr::new(endpoint.address, number), endpoint))
        })
    }

    /// Returns the number of [`Self::endpoints`].
    pub(super) fn count(&self, port: &Port, ipv6: bool) -> u64 {
        self.of(port, ipv6).iter().map(|(slice, _)| slice.endpoints.len() as u64).sum()
    }
}
