//! The controller's interface to the data plane. [`Dataplane`] has it; tests have one without a kernel.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    path::Path,
    time::Duration,
};

use anyhow::Result;
use ipnet::IpNet;

use crate::{
    dataplane::{
        Adopted, Attached, Changed, Dataplane, DataplaneUsage, GoneEndpoint, IdleTimes, Interface, Lost,
        NextHop, Pool, Replaced, Written,
    },
    model::{Changes, Desired, Limits},
    node::{RouteMtus, conntrack::Connection},
};

/// Reads, of the table of connected UDP sockets, those of these endpoints by cookie: [`crate::dataplane::ConnectedUdp::of`].
pub(super) type ReadConnected =
    Box<dyn Fn(&BTreeSet<GoneEndpoint>) -> Result<Vec<BTreeMap<u64, SocketAddr>>> + Send>;

/// The maps and programs, as the controller sees them. Errors are those of [`Dataplane`].
pub(super) trait PacketPath {
    /// Makes the maps equal to what is desired, touching only what `changes` name (everything, the first time).
    fn sync(&mut self, desired: &Desired, changes: &Changes, addresses: &BTreeSet<IpAddr>)
    -> Result<Written>;
    /// Whether the next sync compares everything, not just what changed.
    fn compares_all(&self) -> bool;
    /// Time that the next sync had better wait.
    fn pause(&self) -> Duration;
    /// The room of the maps.
    fn limits(&self) -> Limits;
    fn describe_node(&mut self, primary: &[IpAddr], pod_ranges: &[IpNet]) -> Result<()>;
    /// Settings of the source port pool: finding the free ones takes a while.
    fn pool(&self) -> Pool;
    /// Uses these source ports, unless those in use will do.
    fn use_pool(&mut self, ports: Vec<u16>);
    /// Lets flows go after these times from the next sweep on.
    fn set_idle_times(&mut self, idle: IdleTimes);

    /// Lets the next sweep be a periodic one.
    fn sweep(&mut self) -> Result<()>;
    /// Whether a flow has found no room, so that a sweep is to begin at once.
    fn found_no_room(&mut self) -> bool;
    fn is_sweeping(&self) -> bool;
    /// Does a piece of what is to be swept. Whether that was the end of a periodic sweep.
    fn sweep_on(&mut self) -> Result<bool>;

    /// Programs of another layout version serve until [`Self::adopt`], behind which all is attached to.
    fn is_replacing(&self) -> bool;
    /// Another layout version is not wholly replaced yet.
    fn has_others(&self) -> bool;
    fn adopt(&mut self) -> Result<()>;
    /// Frees what the other version left.
    fn drop_replaced(&mut self) -> Result<Replaced>;

    /// Connections of an earlier proxy are adopted behind the first sync.
    fn begin_adopting(&mut self);
    /// Lets [`Self::adopt_on`] enter connections that conntrack translates for our frontends, and remove ended ones.
    fn adopt_connections(&mut self, connections: Vec<Connection>);
    /// Does a piece of that; what came of it, when it is done.
    fn adopt_on(&mut self) -> Result<Option<Adopted>>;
    /// Whether the next sync is due for it.
    fn end_adopting(&mut self) -> bool;

    fn attach(&mut self, interface: &Interface) -> Result<Attached>;
    fn detach(&mut self, ifindex: u32) -> Result<()>;
    /// Forgets what an earlier agent attached to and this one did not.
    fn forget_others(&mut self) -> Result<()>;
    /// Whether a device is attached to as it is now, and in the way that was asked for.
    fn is_settled(&self, interface: &Interface) -> bool;
    fn attached(&self) -> impl Iterator<Item = (&Interface, Attached)>;
    /// Devices whose programs others have detached, as far as links tell.
    fn lost(&self) -> Vec<Lost>;
    /// Priority and handle of the filters that TC programs are where there are no links for them.
    fn filters(&self) -> Option<(u16, u32)>;
    /// A device is to be attached to anew.
    fn unsettle(&mut self, ifindex: u32);
    /// Calls of the cgroup's processes whose programs were detached.
    fn lost_calls(&self) -> Result<Vec<&'static str>>;

    fn attach_cgroup(&mut self) -> Result<()>;
    /// The cgroup whose connections are served.
    fn cgroup(&self) -> Option<&Path>;
    /// UDP endpoints that stopped serving since the last sweep.
    fn gone_udp(&self) -> BTreeSet<GoneEndpoint>;
    /// The table of connected UDP sockets, to be read in another thread.
    fn connected_udp(&self) -> Result<ReadConnected>;

    /// Tells the packet path the MTUs that routes name; whether it knew others.
    fn set_route_mtus(&mut self, mtus: &RouteMtus) -> Result<bool>;
    /// Stored routes or neighbours may be wrong.
    fn raise(&mut self, changed: Changed) -> Result<()>;
    /// Raises the epoch if the node's routes have another fingerprint than stored next hops; whether they had.
    fn compare_network(&mut self, fingerprint: u32) -> Result<bool>;
    fn note_network(&mut self, fingerprint: u32);
    /// Next hops that packets take now.
    fn next_hops(&self) -> Result<Vec<NextHop>>;

    /// Packets to endpoints of other nodes that were refused, because nothing is attached to the device that leads there.
    fn refused_unattached(&self) -> Result<u64>;

    /// Usage of the maps.
    fn usage(&self) -> DataplaneUsage;
}

impl PacketPath for Dataplane {
    fn sync(
        &mut self,
        desired: &Desired,
        changes: &Changes,
        addresses: &BTreeSet<IpAddr>,
    ) -> Result<Written> {
        self.sync(desired, changes, addresses)
    }

    fn compares_all(&self) -> bool {
        self.compares_all()
    }

    fn pause(&self) -> Duration {
        self.pause()
    }

    fn limits(&self) -> Limits {
        self.limits()
    }

    fn describe_node(&mut self, primary: &[IpAddr], pod_ranges: &[IpNet]) -> Result<()> {
        self.describe_node(primary, pod_ranges)
    }

    fn pool(&self) -> Pool {
        self.pool()
    }

    fn use_pool(&mut self, ports: Vec<u16>) {
        self.use_pool(ports);
    }

    fn set_idle_times(&mut self, idle: IdleTimes) {
        self.set_idle_times(idle);
    }

    fn sweep(&mut self) -> Result<()> {
        self.sweep()
    }

    fn found_no_room(&mut self) -> bool {
        self.found_no_room()
    }

    fn is_sweeping(&self) -> bool {
        self.is_sweeping()
    }

    fn sweep_on(&mut self) -> Result<bool> {
        self.sweep_on()
    }

    fn is_replacing(&self) -> bool {
        self.is_replacing()
    }

    fn has_others(&self) -> bool {
        self.has_others()
    }

    fn adopt(&mut self) -> Result<()> {
        self.adopt()
    }

    fn drop_replaced(&mut self) -> Result<Replaced> {
        self.drop_replaced()
    }

    fn begin_adopting(&mut self) {
        self.begin_adopting();
    }

    fn adopt_connections(&mut self, connections: Vec<Connection>) {
        self.adopt_connections(connections);
    }

    fn adopt_on(&mut self) -> Result<Option<Adopted>> {
        self.adopt_on()
    }

    fn end_adopting(&mut self) -> bool {
        self.end_adopting()
    }

    fn attach(&mut self, interface: &Interface) -> Result<Attached> {
        self.attach(interface)
    }

    fn detach(&mut self, ifindex: u32) -> Result<()> {
        self.detach(ifindex)
    }

    fn forget_others(&mut self) -> Result<()> {
        self.forget_others()
    }

    fn is_settled(&self, interface: &Interface) -> bool {
        self.is_settled(interface)
    }

    fn attached(&self) -> impl Iterator<Item = (&Interface, Attached)> {
        self.attached()
    }

    fn lost(&self) -> Vec<Lost> {
        self.lost()
    }

    fn filters(&self) -> Option<(u16, u32)> {
        self.filters()
    }

    fn unsettle(&mut self, ifindex: u32) {
        self.unsettle(ifindex);
    }

    fn lost_calls(&self) -> Result<Vec<&'static str>> {
        self.lost_calls()
    }

    fn attach_cgroup(&mut self) -> Result<()> {
        self.attach_cgroup()
    }

    fn cgroup(&self) -> Option<&Path> {
        self.cgroup()
    }

    fn gone_udp(&self) -> BTreeSet<GoneEndpoint> {
        self.gone_udp()
    }

    fn connected_udp(&self) -> Result<ReadConnected> {
        let table = self.connected_udp()?;
        Ok(Box::new(move |endpoints| table.of(endpoints)))
    }

    fn set_route_mtus(&mut self, mtus: &RouteMtus) -> Result<bool> {
        self.set_route_mtus(mtus)
    }

    fn raise(&mut self, changed: Changed) -> Result<()> {
        self.raise(changed)
    }

    fn compare_network(&mut self, fingerprint: u32) -> Result<bool> {
        self.compare_network(fingerprint)
    }

    fn note_network(&mut self, fingerprint: u32) {
        self.note_network(fingerprint);
    }

    fn next_hops(&self) -> Result<Vec<NextHop>> {
        self.next_hops()
    }

    fn refused_unattached(&self) -> Result<u64> {
        self.refused_unattached()
    }

    fn usage(&self) -> DataplaneUsage {
        self.usage()
    }
}
