//! The controller's interface to the data plane. [`Dataplane`] implements it; tests use an
//! implementation without a kernel.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    path::Path,
    time::Duration,
};

use anyhow::Result;
use ipnet::IpNet;
use traffic_policy_cluster::model::{Changes, Desired, Limits};
use traffic_policy_dataplane::{
    Adopted, Attached, Changed, Dataplane, DataplaneUsage, GoneEndpoint, IdleTimes, Interface, Lost, NextHop,
    Pool, Replaced, Written,
    node::{RouteMtus, conntrack::Connection},
};

/// Reads the table of connected UDP sockets and returns those of these endpoints, by cookie:
/// [`traffic_policy_dataplane::ConnectedUdp::of`].
pub(super) type ReadConnected =
    Box<dyn Fn(&BTreeSet<GoneEndpoint>) -> Result<Vec<BTreeMap<u64, SocketAddr>>> + Send>;

/// The maps and programs, as the controller sees them. Errors are those of [`Dataplane`].
pub(super) trait PacketPath {
    /// Makes the maps equal to the desired state, touching only what `changes` name (everything,
    /// the first time).
    fn sync(&mut self, desired: &Desired, changes: &Changes, addresses: &BTreeSet<IpAddr>)
    -> Result<Written>;
    /// Whether the next sync compares everything, not just what changed.
    fn compares_all(&self) -> bool;
    /// Returns the time by which the next sync is best delayed.
    fn pause(&self) -> Duration;
    /// Returns the capacity of the maps.
    fn limits(&self) -> Limits;
    fn describe_node(&mut self, primary: &[IpAddr], pod_ranges: &[IpNet]) -> Result<()>;
    /// Returns the settings of the SNAT ports: finding the free ones takes a while.
    fn pool(&self) -> Pool;
    /// Uses these source ports, unless those in use suffice.
    fn use_pool(&mut self, ports: Vec<u16>);
    /// Applies these idle times from the next sweep on.
    fn set_idle_times(&mut self, idle: IdleTimes);

    /// Makes the next sweep a periodic one.
    fn sweep(&mut self) -> Result<()>;
    /// Whether a flow has found no room, so that a sweep must begin at once.
    fn found_no_room(&mut self) -> bool;
    fn is_sweeping(&self) -> bool;
    /// Does a piece of the sweep. Returns whether that was the end of a periodic sweep.
    fn sweep_on(&mut self) -> Result<bool>;

    /// Whether programs of another layout version serve until [`Self::adopt`], after which
    /// everything is attached to.
    fn is_replacing(&self) -> bool;
    /// Whether another layout version is not wholly replaced yet.
    fn has_others(&self) -> bool;
    fn adopt(&mut self) -> Result<()>;
    /// Frees what the other version has left.
    fn drop_replaced(&mut self) -> Result<Replaced>;

    /// Marks connections of an earlier proxy as to be adopted after the first sync.
    fn begin_adopting(&mut self);
    /// Prepares [`Self::adopt_on`] to enter connections that conntrack translates for our
    /// frontends, and to remove ended ones.
    fn adopt_connections(&mut self, connections: Vec<Connection>);
    /// Does a piece of the adoption. Returns its result when it is done.
    fn adopt_on(&mut self) -> Result<Option<Adopted>>;
    /// Ends the adoption. Returns whether the next sync is due because of it.
    fn end_adopting(&mut self) -> bool;

    fn attach(&mut self, interface: &Interface) -> Result<Attached>;
    fn detach(&mut self, ifindex: u32) -> Result<()>;
    /// Forgets devices to which an earlier agent was attached and this one is not.
    fn forget_others(&mut self) -> Result<()>;
    /// Whether a device is attached to in its present state, and in the requested mode.
    fn is_settled(&self, interface: &Interface) -> bool;
    fn attached(&self) -> impl Iterator<Item = (&Interface, Attached)>;
    /// Returns the devices whose programs others have detached, as far as links show.
    fn lost(&self) -> Vec<Lost>;
    /// Returns priority and handle of the filters that TC programs are where there are no links for
    /// them.
    fn filters(&self) -> Option<(u16, u32)>;
    /// Marks a device as to be attached to anew.
    fn unsettle(&mut self, ifindex: u32);
    /// Returns the calls of the cgroup's processes whose programs were detached.
    fn lost_calls(&self) -> Result<Vec<&'static str>>;

    fn attach_cgroup(&mut self) -> Result<()>;
    /// Returns the cgroup whose connections are served.
    fn cgroup(&self) -> Option<&Path>;
    /// Returns the UDP endpoints that stopped serving since the last sweep.
    fn gone_udp(&self) -> BTreeSet<GoneEndpoint>;
    /// Returns a reader of the table of connected UDP sockets, for use in another thread.
    fn connected_udp(&self) -> Result<ReadConnected>;

    /// Passes the MTUs that routes name to the packet path. Returns whether it had others.
    fn set_route_mtus(&mut self, mtus: &RouteMtus) -> Result<bool>;
    /// Raises epochs, because stored routes or neighbours may be wrong.
    fn raise(&mut self, changed: Changed) -> Result<()>;
    /// Raises the epoch if the node's routes have another fingerprint than stored next hops.
    /// Returns whether they had.
    fn compare_network(&mut self, fingerprint: u32) -> Result<bool>;
    fn note_network(&mut self, fingerprint: u32);
    /// Returns the next hops that packets take now.
    fn next_hops(&self) -> Result<Vec<NextHop>>;

    /// Returns the number of packets to endpoints of other nodes that were refused, because nothing
    /// is attached to the device that leads there.
    fn refused_unattached(&self) -> Result<u64>;

    /// Returns the usage of the maps.
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
