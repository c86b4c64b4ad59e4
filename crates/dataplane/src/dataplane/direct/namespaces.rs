//! The network namespaces of the endpoints on this node, by which the packet path asks the stack of
//! a pod for a connection.

use std::{collections::BTreeMap, net::IpAddr};

use crate::node::pod_namespaces;

/// The namespaces that are known, as `tp_direct_eps4` and `tp_direct_eps6` name them: the id plus
/// 1.
#[derive(Debug, Default)]
pub(super) struct Namespaces(BTreeMap<IpAddr, u16>);

impl Namespaces {
    /// Looks for the namespaces anew if one of these addresses is in none that is known, or `all`
    /// is set.
    pub(super) fn learn(&mut self, addresses: impl IntoIterator<Item = IpAddr>, all: bool) {
        let mut unknown = addresses.into_iter().filter(|address| !self.0.contains_key(address));
        let first = unknown.next();
        if first.is_none() && (!all || self.0.is_empty()) {
            return;
        }
        match pod_namespaces::by_address() {
            Ok(found) => {
                let numbered = |(address, id)| Some((address, u16::try_from(id + 1).ok()?));
                self.0 = found.into_iter().filter_map(numbered).collect();
            }
            Err(error) => tracing::debug!("the pods' network namespaces cannot be listed: {error}"),
        }
    }

    /// Returns the number of the namespace with an address; 0 if it is not known.
    pub(super) fn of(&self, address: IpAddr) -> u16 {
        self.0.get(&address).copied().unwrap_or(0)
    }
}
