//! The maps of direct forwarding: who may send, and for which endpoints packets are opened.

use std::net::Ipv4Addr;

use anyhow::Result;
use traffic_policy_ebpf::abi::NO_SERVICE;

use super::{Harness, Spot};

impl Harness {
    /// Lets another node send packets directly to this one.
    pub fn let_send_directly(&mut self, from: Spot) {
        let written = self.map("tp_direct_from4").write(&address(from), &1_u32.to_ne_bytes());
        written.unwrap_or_else(|error| panic!("naming a node: {error:#}"));
    }

    /// Opens packets for an endpoint of the frontend of this number.
    pub fn open_for(&mut self, endpoint: Spot, number: u32, port: u16) {
        self.write_endpoint(endpoint, number, port)
            .and_then(|()| self.write_endpoint(endpoint, NO_SERVICE, 0))
            .unwrap_or_else(|error| panic!("naming an endpoint: {error:#}"));
    }

    fn write_endpoint(&self, endpoint: Spot, service: u32, port: u16) -> Result<()> {
        let key = [address(endpoint), service.to_ne_bytes()].concat();
        let value = [port.to_be_bytes(), [0; 2]].concat();
        self.map("tp_direct_eps4").write(&key, &value)
    }
}

fn address(spot: Spot) -> [u8; 4] {
    let v4: Ipv4Addr = spot.addresses().v4;
    v4.octets()
}
