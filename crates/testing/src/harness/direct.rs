//! The maps of direct forwarding: who may send, and for which endpoints packets are opened.

use anyhow::Result;
use traffic_policy_ebpf::abi::NO_SERVICE;

use super::{Harness, Spot};

impl Harness {
    /// Lets another node send packets directly to this one, from its addresses of both families.
    pub fn let_send_directly(&mut self, from: Spot) {
        for (map, address) in [("tp_direct_from4", v4(from)), ("tp_direct_from6", v6(from))] {
            let written = self.map(map).write(&address, &1_u32.to_ne_bytes());
            written.unwrap_or_else(|error| panic!("naming a node: {error:#}"));
        }
    }

    /// Opens packets for an endpoint of the frontend of this number, by its addresses of both
    /// families.
    pub fn open_for(&mut self, endpoint: Spot, number: u32, port: u16) {
        self.write_endpoint(endpoint, number, port)
            .and_then(|()| self.write_endpoint(endpoint, NO_SERVICE, 0))
            .unwrap_or_else(|error| panic!("naming an endpoint: {error:#}"));
    }

    fn write_endpoint(&self, endpoint: Spot, service: u32, port: u16) -> Result<()> {
        let value = [port.to_be_bytes(), [0; 2]].concat();
        for (map, address) in [("tp_direct_eps4", v4(endpoint)), ("tp_direct_eps6", v6(endpoint))] {
            let key = [address, service.to_ne_bytes().to_vec(), vec![0; 4]].concat();
            self.map(map).write(&key, &value)?;
        }
        Ok(())
    }
}

fn v4(spot: Spot) -> Vec<u8> {
    spot.addresses().v4.octets().to_vec()
}

fn v6(spot: Spot) -> Vec<u8> {
    spot.addresses().v6.octets().to_vec()
}
