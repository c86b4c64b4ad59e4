//! The network namespaces of the endpoints on this node, by which the packet path asks the stack of
//! a pod for a connection.

use std::{collections::BTreeMap, io, net::IpAddr};

/// The namespaces that are known, as `tp_direct_eps4` and `tp_direct_eps6` name them: the id plus
/// 1.
#[derive(Debug, Default)]
pub(super) struct Namespaces(BTreeMap<IpAddr, u16>);

impl Namespaces {
    /// Looks for the namespaces anew, by `find`, if one of these addresses is in none that is
    /// known, or `all` is set.
    pub(super) fn learn(
        &mut self,
        addresses: impl IntoIterator<Item = IpAddr>,
        all: bool,
        find: impl FnOnce() -> io::Result<BTreeMap<IpAddr, u32>>,
    ) {
        let mut unknown = addresses.into_iter().filter(|address| !self.0.contains_key(address));
        let first = unknown.next();
        if first.is_none() && (!all || self.0.is_empty()) {
            return;
        }
        match find() {
            Ok(found) => {
                let numbered = |(address, id)| Some((address, u16::try_from(id + 1).ok()?));
                self.0 = found.into_iter().filter_map(numbered).collect();
            }
            Err(error) => tracing::debug!("the pods' network namespaces cannot be listed: {error}"),
        }
    }

    /// Forgets the namespace of an address that is no endpoint any more: if it comes back, as that
    /// of a pod of a StatefulSet may, it is in another one.
    pub(super) fn forget(&mut self, address: IpAddr) {
        self.0.remove(&address);
    }

    /// Returns the number of the namespace with an address; 0 if it is not known.
    pub(super) fn of(&self, address: IpAddr) -> u16 {
        self.0.get(&address).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_comes_back_is_looked_for_anew() {
        let address = IpAddr::from([10, 244, 1, 2]);
        let mut namespaces = Namespaces::default();
        let mut learned = |id, looks, forgets: bool| {
            if forgets {
                namespaces.forget(address);
            }
            let mut looked = false;
            namespaces.learn([address], false, || {
                looked = true;
                Ok([(address, id)].into())
            });
            assert_eq!(looked, looks, "{id}");
            namespaces.of(address)
        };
        assert_eq!(learned(4, true, false), 5);
        assert_eq!(learned(6, false, false), 5, "it is known");
        assert_eq!(learned(6, true, true), 7);
    }
}
