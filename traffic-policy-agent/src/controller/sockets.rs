//! Sockets within the run loop: the node's description for programs on the cgroup, and UDP sockets
//! of removed endpoints.

use std::{collections::BTreeSet, net::IpAddr, path::Path};

use anyhow::Result;
use ipnet::IpNet;
use traffic_policy_dataplane::{
    CgroupPrograms, FlowSweeps, NodeDescription, ReadConnected, RemovedEndpoint,
    node::{socket_ender::SocketEnder, sockets::Destroyed},
};

use super::flight::Flight;

/// Passes the node's own addresses and pod ranges to the programs on the cgroup, before frontends
/// are written whose source ranges they are compared with.
pub(super) fn describe_node(path: &mut impl NodeDescription, primary: &[IpAddr], pods: &[IpNet]) {
    if let Err(error) = path.describe_node(primary, pods) {
        tracing::warn!("source ranges are compared with old addresses of the node: {error:#}");
    }
}

/// The walk through all processes, one at a time: while there are removed endpoints, each write
/// requests one.
pub(super) type EndingSockets = Flight<(ReadConnected, BTreeSet<RemovedEndpoint>)>;

/// Ends UDP sockets that are connected to endpoints which no longer serve: the application gets an
/// error and connects again. It is called after the maps were written, when no new socket connects
/// there any more, and once more before the sweep forgets the endpoints: a call that was under way
/// may have noted its socket late.
pub(super) fn end_sockets(
    path: &(impl CgroupPrograms + FlowSweeps),
    ender: &SocketEnder,
    ending: &EndingSockets,
) {
    let Some(cgroup) = path.cgroup() else { return };
    let endpoints = path.removed_udp();
    if endpoints.is_empty() {
        return;
    }
    match path.connected_udp() {
        Ok(sockets) => {
            let (cgroup, ender) = (cgroup.to_owned(), ender.clone());
            // The work walks through namespaces, each with a dump of its sockets.
            ending.request(
                (sockets, endpoints),
                |(_, earlier), (sockets, endpoints)| (sockets, &earlier | &endpoints),
                move |(sockets, endpoints)| report(end(&ender, &cgroup, &sockets, &endpoints)),
            );
        }
        Err(error) => tracing::warn!("connected UDP sockets keep endpoints that are gone: {error:#}"),
    }
}

/// Logs the sockets that were ended, and the failures.
fn end(
    ender: &SocketEnder,
    cgroup: &Path,
    connected: &ReadConnected,
    endpoints: &BTreeSet<RemovedEndpoint>,
) -> Result<Destroyed> {
    let mut all = Destroyed::default();
    for cookies in connected(endpoints)? {
        let mut destroyed = ender.destroy(cgroup, cookies)?;
        all.cookies.append(&mut destroyed.cookies);
        all.failures.append(&mut destroyed.failures);
        all.namespaces = all.namespaces.max(destroyed.namespaces);
    }
    Ok(all)
}

fn report(ended: Result<Destroyed>) {
    match ended {
        Ok(ended) => {
            if !ended.cookies.is_empty() {
                tracing::info!(sockets = ended.cookies.len(), "ended UDP sockets whose endpoint is gone");
            }
            for failure in ended.failures {
                tracing::warn!("connected UDP sockets may keep an endpoint that is gone: {failure}");
            }
        }
        Err(error) => tracing::warn!("connected UDP sockets keep endpoints that are gone: {error:#}"),
    }
}
