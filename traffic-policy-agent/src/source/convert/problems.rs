//! Parts of an object that cannot be used: left out, and reported with the object.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::model::address::{parse_cidr, parse_ip, unusable};

/// Unusable parts of one object.
pub(super) struct Problems {
    pub(super) object: String,
    /// One for each problem, complete.
    pub(super) sentences: Vec<String>,
}

impl Problems {
    pub(super) fn tell(&mut self, field: &str, what: &str) {
        self.sentences.push(format!("{}: {field} {what}.", self.object));
    }

    pub(super) fn address(&mut self, field: &str, text: &str) -> Option<IpAddr> {
        let Some(ip) = parse_ip(text) else {
            self.tell(field, &format!("{text:?} is not an IP address, and is left out"));
            return None;
        };
        if let Some(reason) = unusable(ip) {
            self.tell(field, &format!("{text:?} is {reason}, and is left out"));
            return None;
        }
        Some(ip)
    }

    /// The CIDRs that are some. One of all addresses is a mistake: it would admit every source.
    pub(super) fn cidrs(&mut self, field: &str, texts: &[String]) -> Vec<IpNet> {
        let mut cidrs = Vec::new();
        for (i, text) in texts.iter().enumerate().filter(|(_, text)| !text.is_empty()) {
            match parse_cidr(text) {
                Some(cidr) if cidr.prefix_len() > 0 => cidrs.push(cidr),
                Some(_) => {
                    self.tell(
                        &format!("{field}[{i}]"),
                        &format!("{text:?} is every address, and is left out"),
                    );
                }
                None => {
                    self.tell(&format!("{field}[{i}]"), &format!("{text:?} is not a CIDR, and is left out"));
                }
            }
        }
        cidrs
    }

    /// The usable addresses, without duplicates, in order.
    pub(super) fn addresses(&mut self, field: &str, texts: &[String]) -> Vec<IpAddr> {
        let mut addresses = Vec::new();
        for (i, text) in texts.iter().enumerate().filter(|(_, text)| !text.is_empty()) {
            if let Some(ip) = self.address(&format!("{field}[{i}]"), text)
                && !addresses.contains(&ip)
            {
                addresses.push(ip);
            }
        }
        addresses
    }
}
