//! The maps of direct forwarding: who may send, and for which endpoints packets are opened.

use anyhow::Result;
use traffic_policy_ebpf::abi::{Address4, Address6, MAC_TAKES, NO_SERVICE, SlotRoute, mac_key};

use super::{Harness, Spot};

impl Harness {
    /// Lets another node send packets directly to this one, from its addresses of both families.
    pub fn let_send_directly(&mut self, from: Spot) {
        self.let_send_directly_as(from, 1);
    }

    /// Lets another node send packets as [`Self::let_send_directly`] does, under a number.
    pub fn let_send_directly_as(&mut self, from: Spot, number: u32) {
        for (from, by_number, address, route) in [
            ("tp_direct_from4", "tp_direct_node4", v4(from), size_of::<SlotRoute<Address4>>()),
            ("tp_direct_from6", "tp_direct_node6", v6(from), size_of::<SlotRoute<Address6>>()),
        ] {
            let node = [address.clone(), vec![0; route]].concat();
            self.map(by_number)
                .write(&number.to_ne_bytes(), &node)
                .and_then(|()| self.map(from).write(&address, &number.to_ne_bytes()))
                .unwrap_or_else(|error| panic!("naming a node: {error:#}"));
        }
    }

    /// Names the MAC address of another node, and whether it takes packets that are sent to it as
    /// they are. Next hops that were resolved before do not know it.
    pub fn name_mac(&mut self, mac: [u8; 6], takes: bool) {
        let flags = if takes { MAC_TAKES } else { 0 };
        let written = self.map("tp_direct_macs").write(&mac_key(mac).to_ne_bytes(), &flags.to_ne_bytes());
        written.unwrap_or_else(|error| panic!("naming a MAC address: {error:#}"));
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
