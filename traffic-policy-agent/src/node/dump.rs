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
        let [routes4, routes6] =
            [RouteMessageBuilder::<Ipv4Addr>::new().build(), RouteMessageBuilder::<Ipv6Addr>::new().build()]
                .map(|request| handle.route().get(request).execute());
        let [rules4, rules6] =
            [IpVersion::V4, IpVersion::V6].map(|version| handle.rule().get(version).execute());
        vec![
            ("links", answered("listing devices", lines(handle.link().get().execute())).await),
            ("addresses", answered("listing addresses", lines(handle.address().get().execute())).await),
            ("routes-ipv4", answered("listing routes", lines(routes4)).await),
            ("routes-ipv6", answered("listing routes", lines(routes6)).await),
            ("rules-ipv4", answered("listing rules", lines(rules4)).await),
            ("rules-ipv6", answered("listing rules", lines(rules6)).await),
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
