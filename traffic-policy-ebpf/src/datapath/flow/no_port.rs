//! Endpoints that have no free source port: until the end of the next jiffy the search for one is
//! skipped.

use traffic_policy_ebpf::{
    abi::{Address, NO_PORT_PLACES, Scratch, TableUsage},
    hash,
};

use crate::datapath::{
    barrier::opaque,
    value::{load_once, store_once},
};

/// The note about one endpoint. Others share its word; the last one to note counts.
pub struct NoPort {
    word: *mut u64,
    endpoint: u64,
    now: u32,
}

impl NoPort {
    /// Returns the note about the endpoint of the reply entry in `scratch`.
    #[inline(always)]
    pub fn of<A: Address>(scratch: *mut Scratch<A>, usage: *mut TableUsage) -> Self {
        let port = get!(scratch.port_search.endpoint_port).to_host() as u32;
        let endpoint = hash::endpoint(get!(scratch.key.source), port << 16 | get!(scratch.key.protocol));
        let index = opaque(endpoint) as usize & (NO_PORT_PLACES - 1);
        Self { word: place!(mut usage.no_port[index]), endpoint, now: get!(scratch.port_search.now) }
    }

    /// Whether a search for a port has failed in this jiffy or the last one.
    #[inline(always)]
    pub fn is_known(&self) -> bool {
        load_once(self.word) == self.value(self.now)
            || load_once(self.word) == self.value(self.now.wrapping_sub(1))
    }

    /// Notes that a search has failed.
    #[inline(always)]
    pub fn note(&self) {
        store_once(self.word, self.value(self.now));
    }

    #[inline(always)]
    fn value(&self, now: u32) -> u64 {
        self.endpoint & !(u32::MAX as u64) | now as u64
    }
}
