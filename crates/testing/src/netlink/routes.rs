//! Routes of a namespace, and the rules that choose among tables of them.

use std::net::IpAddr;

use anyhow::{Context, Result};
use futures::TryStreamExt;
use netlink_packet_route::route::{RouteMessage, RouteScope, RouteType};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use rtnetlink::{IpVersion, RouteMessageBuilder};

use super::{Netlink, index};
use crate::family::Family;

impl Netlink {
    /// Adds or replaces a route to `destination`/`prefix` via a gateway.
    pub async fn route(&self, destination: IpAddr, prefix: u8, gateway: IpAddr) -> Result<()> {
        let message = route(destination, prefix, gateway)?.build();
        self.replace_route(message)
            .await
            .with_context(|| format!("route to {destination}/{prefix} via {gateway}"))
    }

    /// A variant of [`Self::route`] for another table than the main one.
    pub async fn route_in(&self, table: u32, to: IpAddr, prefix: u8, gateway: IpAddr) -> Result<()> {
        let message = route(to, prefix, gateway)?.table_id(table).build();
        let replaced = self.replace_route(message).await;
        replaced.with_context(|| format!("route to {to}/{prefix} via {gateway} in table {table}"))
    }

    /// Adds a rule that routes packets from an address by a table.
    pub async fn rule_from(&self, source: IpAddr, table: u32, priority: u32) -> Result<()> {
        let rule = self.0.rule().add().table_id(table).action(RuleAction::ToTable).priority(priority);
        let added = match source {
            IpAddr::V4(source) => rule.v4().source_prefix(source, 32).execute().await,
            IpAddr::V6(source) => rule.v6().source_prefix(source, 128).execute().await,
        };
        added.with_context(|| format!("rule from {source} to table {table}"))
    }

    /// Removes the rule that [`Self::rule_from`] added.
    pub async fn remove_rule_from(&self, source: IpAddr, table: u32) -> Result<()> {
        let version = if source.is_ipv4() { IpVersion::V4 } else { IpVersion::V6 };
        let rules: Vec<_> = self.0.rule().get(version).execute().try_collect().await?;
        let is_it = |rule: &&RuleMessage| {
            u32::from(rule.header.table) == table && rule.attributes.contains(&RuleAttribute::Source(source))
        };
        let rule = rules.iter().find(is_it).with_context(|| format!("no rule from {source}"))?;
        let removed = self.0.rule().del(rule.clone()).execute().await;
        removed.with_context(|| format!("removing the rule from {source}"))
    }

    /// Adds a rule that routes packets with a mark by a table.
    pub async fn rule_marked(&self, family: Family, mark: u32, table: u32, priority: u32) -> Result<()> {
        let rule = self.0.rule().add().table_id(table).action(RuleAction::ToTable).priority(priority);
        let rule = rule.fw_mark(mark);
        let added = match family {
            Family::V4 => rule.v4().execute().await,
            Family::V6 => rule.v6().execute().await,
        };
        added.with_context(|| format!("rule for the mark {mark:#x}"))
    }

    /// Adds a rule that routes packets that arrive on a device by a table.
    pub async fn rule_arriving(&self, family: Family, device: &str, table: u32, priority: u32) -> Result<()> {
        let rule = self.0.rule().add().table_id(table).action(RuleAction::ToTable).priority(priority);
        let rule = rule.input_interface(device.to_owned());
        let added = match family {
            Family::V4 => rule.v4().execute().await,
            Family::V6 => rule.v6().execute().await,
        };
        added.with_context(|| format!("rule for what comes by {device}"))
    }

    /// Adds a route by a device without a gateway, in another table than the main one.
    pub async fn route_by_device(&self, table: u32, to: IpAddr, prefix: u8, device: &str) -> Result<()> {
        let route = RouteMessageBuilder::<IpAddr>::new().destination_prefix(to, prefix)?;
        let route = route.output_interface(index(device)?).table_id(table).build();
        self.replace_route(route).await.with_context(|| format!("route to {to}/{prefix} by {device}"))
    }

    /// A variant of [`Self::route`] for a gateway that no address of `device` covers.
    pub async fn route_on_link(&self, to: IpAddr, prefix: u8, gateway: IpAddr, device: &str) -> Result<()> {
        let route = route(to, prefix, gateway)?.output_interface(index(device)?).onlink().build();
        self.replace_route(route)
            .await
            .with_context(|| format!("route to {to}/{prefix} via {gateway} on {device}"))
    }

    /// Adds a route of type unreachable.
    pub async fn unreachable(&self, destination: IpAddr, prefix: u8) -> Result<()> {
        let route = RouteMessageBuilder::<IpAddr>::new().destination_prefix(destination, prefix)?;
        self.replace_route(route.kind(RouteType::Unreachable).build())
            .await
            .with_context(|| format!("unreachable route to {destination}/{prefix}"))
    }

    /// Removes a route that [`Self::unreachable`] added.
    pub async fn reachable(&self, destination: IpAddr, prefix: u8) -> Result<()> {
        let route = RouteMessageBuilder::<IpAddr>::new().destination_prefix(destination, prefix)?;
        let route = route.kind(RouteType::Unreachable).build();
        let deleted = self.0.route().del(route).execute().await;
        deleted.with_context(|| format!("deleting the unreachable route to {destination}/{prefix}"))
    }

    /// Makes an address local to this machine without assigning it to a device, as cloud providers'
    /// agents do with the addresses of load balancers: `ip route add to local ADDRESS dev DEVICE`.
    pub async fn local(&self, address: IpAddr, device: &str) -> Result<()> {
        const LOCAL_TABLE: u32 = 255;
        let prefix = if address.is_ipv4() { 32 } else { 128 };
        let route = RouteMessageBuilder::<IpAddr>::new().destination_prefix(address, prefix)?;
        let route = route.kind(RouteType::Local).table_id(LOCAL_TABLE).output_interface(index(device)?);
        let added = self.replace_route(route.scope(RouteScope::Host).build()).await;
        added.with_context(|| format!("local route to {address} on {device}"))
    }

    pub async fn delete_route(&self, destination: IpAddr, prefix: u8) -> Result<()> {
        let route = RouteMessageBuilder::<IpAddr>::new().destination_prefix(destination, prefix)?;
        let deleted = self.0.route().del(route.build()).execute().await;
        deleted.with_context(|| format!("deleting the route to {destination}/{prefix}"))
    }

    pub(super) async fn replace_route(&self, message: RouteMessage) -> Result<()> {
        Ok(self.0.route().add(message).replace().execute().await?)
    }
}

fn route(destination: IpAddr, prefix: u8, gateway: IpAddr) -> Result<RouteMessageBuilder<IpAddr>> {
    Ok(RouteMessageBuilder::<IpAddr>::new().destination_prefix(destination, prefix)?.gateway(gateway)?)
}
