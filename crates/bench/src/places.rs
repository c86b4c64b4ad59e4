//! Places of flows, which the packet path hands out and the garbage collection takes back.

use anyhow::Result;
use aya::{
    Pod,
    maps::{Array, Map, MapData},
};
use traffic_policy_ebpf::{
    abi::{Address, Flow, Tuple},
    tcp::ASSURED,
};

/// The directory of flows that may be over, and the queues of unassured flows, for one family.
pub struct Places<A: Address> {
    directory: Array<MapData, Tuple<A>>,
    unassured: Array<MapData, Tuple<A>>,
}

impl<A: Address> Places<A> {
    /// Opens both maps.
    pub(super) fn new(directory: Map, unassured: Map) -> Result<Self> {
        Ok(Self { directory: directory.try_into()?, unassured: unassured.try_into()? })
    }

    /// Takes back the places of a flow, given its entry for requests.
    pub(super) fn take_back(&mut self, request: &Flow<A>) -> Result<()>
    where
        Tuple<A>: Pod,
    {
        let place = request.device_or_place.place();
        if place != 0 {
            self.directory.set(place, Tuple::default(), 0)?;
        }
        // An assured flow has returned its place, and stores other data there.
        if request.state & ASSURED == 0 {
            self.unassured.set(request.tail.queue_place(), Tuple::default(), 0)?;
        }
        Ok(())
    }
}
