//! Lists of devices, addresses, routes, rules and neighbours from the kernel, for `bugtool`.

use std::{
    fmt::Debug,
    net::{Ipv4Addr, Ipv6Addr},
};

use anyhow::Result;
use futures::{Stream, TryStreamExt};
use rtnetlink::{IpVersion, RouteMessageBuilder};

use super::network::{Network, answered};

/// The most lines of a list: a router may have a million routes.
const LINES: usize = 20_000;

impl Network {
    /// Returns each list by its name, with one message per line, or the reason why it is missing.
    pub async fn dump(&self) -> Vec<(&'static str, Result<String>)> {
        let handle = &self.handle;
        // The requests are sequential: the kernel answers a second request for a list on a socket
        // with EBUSY until the first is read (`__netlink_dump_start` in net/netlink/af_netlink.c),
        // and `execute` sends a request.
        let routes = |request| handle.route().get(request).execute();
        let [ipv4, ipv6] =
            [RouteMessageBuilder::<Ipv4Addr>::new().build(), RouteMessageBuilder::<Ipv6Addr>::new().build()];
        let rules = |version| handle.rule().get(version).execute();
        vec![
            ("links", answered("listing devices", lines(handle.link().get().execute())).await),
            ("addresses", answered("listing addresses", lines(handle.address().get().execute())).await),
            ("routes-ipv4", answered("listing routes", lines(routes(ipv4))).await),
            ("routes-ipv6", answered("listing routes", lines(routes(ipv6))).await),
            ("rules-ipv4", answered("listing rules", lines(rules(IpVersion::V4))).await),
            ("rules-ipv6", answered("listing rules", lines(rules(IpVersion::V6))).await),
            ("neighbours", answered("listing neighbours", lines(handle.neighbours().get().execute())).await),
        ]
    }
}

async fn lines<T: Debug>(list: impl Stream<Item = Result<T, rtnetlink::Error>>) -> Result<String> {
    let mut list = std::pin::pin!(list);
    let (mut text, mut number) = (String::new(), 0);
    while let Some(message) = list.try_next().await? {
        number += 1;
        if number <= LINES {
            text.push_str(&format!("{message:?}\n"));
        }
    }
    if number > LINES {
        text.push_str(&format!("and {} more\n", number - LINES));
    }
    Ok(text)
}
