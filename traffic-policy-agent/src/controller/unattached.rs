//! Devices without programs that lead to endpoints of other nodes: what goes there is refused, and why is said.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use anyhow::Result;

use super::{PacketPath, network::NodeNetwork};
use crate::source::{ObjectEvent, Subject};

/// Endpoints whose routes are asked for at once: one question to the kernel each.
const ASKED: usize = 1000;

/// The devices, and the endpoints behind them.
#[derive(Debug, Default)]
pub(super) struct Unattached {
    /// Packets that were refused when it was last looked.
    refused: u64,
    /// Devices that have been told of.
    told: BTreeSet<u32>,
}

impl NodeNetwork {
    /// Looks where endpoints of other nodes are, if packets to some of them have been refused since the last time, and tells of each
    /// device once. Nobody is asked before: a node may have very many endpoints.
    pub(super) async fn tell_unattached(
        &mut self,
        path: &impl PacketPath,
        endpoints: impl FnOnce() -> BTreeSet<IpAddr>,
    ) -> Result<()> {
        let refused = path.refused_unattached()?;
        if std::mem::replace(&mut self.unattached.refused, refused) == refused {
            return Ok(());
        }
        let mut behind: BTreeMap<u32, Vec<IpAddr>> = BTreeMap::new();
        for endpoint in endpoints().into_iter().take(ASKED) {
            if let Some(device) = self.network.device_towards(endpoint).await {
                behind.entry(device).or_default().push(endpoint);
            }
        }
        let attached: BTreeSet<u32> = path.attached().map(|(interface, _)| interface.ifindex).collect();
        behind.retain(|device, _| !attached.contains(device));
        self.unattached.told.retain(|told| behind.contains_key(told));
        let links = self.network.links().await?;
        for (device, endpoints) in behind {
            let Some(link) = links.iter().find(|link| link.index == device && !link.loopback) else {
                continue;
            };
            if self.unattached.told.insert(device) {
                let message = sentence(&link.name, &endpoints, &self.named);
                tracing::warn!("{message}");
                self.events.push(ObjectEvent::warning(Subject::Node, "UnattachedDevice", "Attach", message));
            }
        }
        Ok(())
    }
}

fn sentence(device: &str, endpoints: &[IpAddr], named: &[String]) -> String {
    let some: Vec<_> = endpoints.iter().take(3).map(ToString::to_string).collect();
    let more = match endpoints.len().saturating_sub(some.len()) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let (why, all) = if named.is_empty() {
        (
            "it was not found, for no default route and no route by a gateway leads there, and it has no address of the Node's".to_owned(),
            format!("every device that packets come by, {device} among them"),
        )
    } else {
        (format!("--device names {}", named.join(", ")), format!("{device}, too"))
    };
    format!(
        "connections to endpoints of other nodes behind {device} ({}{more}) are refused (dropped-unattached-device): nothing is attached to it, {why}; \
         name {all}, with --device",
        some.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sentence_says_why_and_what_to_do() {
        let endpoints: Vec<IpAddr> = (1..=5).map(|last| IpAddr::from([10, 244, 2, last])).collect();
        let named = sentence("eth1", &endpoints[..2], &["eth0".to_owned()]);
        assert!(
            named.contains("(10.244.2.1, 10.244.2.2)") && named.contains("--device names eth0;"),
            "{named}"
        );
        assert!(named.ends_with("name eth1, too, with --device"), "{named}");
        let found = sentence("eth1", &endpoints, &[]);
        assert!(
            found.contains("10.244.2.3 and 2 more") && found.contains("no route by a gateway"),
            "{found}"
        );
    }
}
