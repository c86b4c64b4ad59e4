//! Devices, addresses, routes, rules and neighbours as the kernel lists them, for `bugtool`.

use std::{
    fmt::Debug,
    net::{Ipv4Addr, Ipv6Addr},
};

use anyhow::Result;
use futures::{Stream, TryStreamExt};
use rtnetlink::{IpVersion, RouteMessageBuilder};

use super::network::{Network, answered};

/// Lines of a list. A router may have a million routes.
const LINES: usize = 20_000;

impl Network {
    /// Each list by its name, a message on a line, or why there is none.
    pub async fn dump(&self) -> Vec<(&'static str, Result<String>)> {
        let handle = &self.handle;
        // One after the other: the kernel answers a second request for a list on a socket with EBUSY until the first is read
        // (`__netlink_dump_start` in net/netlink/af_netlink.c), and a request is sent by `execute`.
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
