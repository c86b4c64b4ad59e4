//! The value of `--metrics-address`.

use std::{net::SocketAddr, str::FromStr};

/// Value of `--metrics-address`; `None`: metrics are not served.
#[derive(Clone, Copy, Debug)]
pub(super) struct MetricsAddress(pub(super) Option<SocketAddr>);

impl FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() || text == "none" {
            return Ok(Self(None));
        }
        let address = text
            .parse()
            .map_err(|_| format!("`{text}` is not an address: write 127.0.0.1:10249, [::1]:10249 or none"))?;
        Ok(Self(Some(address)))
    }
}
