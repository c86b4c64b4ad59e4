//! Parts of an object that cannot be used: left out, and reported with the object.

use std::{collections::HashSet, net::IpAddr};

use ipnet::IpNet;

use crate::model::address::{parse_cidr, parse_ip, unusable};

/// Unusable parts of one object.
pub(super) struct Problems {
    pub(super) object: String,
    /// One complete sentence for each problem, up to [`Self::MOST`], and then one more.
    pub(super) sentences: Vec<String>,
}

impl Problems {
    /// The largest number of problems reported. An object may have as many mistakes as fields, and
    /// no person reads that many.
    const MOST: usize = 50;

    pub(super) fn tell(&mut self, field: &str, what: &str) {
        match self.sentences.len() {
            ..Self::MOST => self.sentences.push(format!("{}: {field} {what}.", self.object)),
            Self::MOST => self.sentences.push(format!("{}: more of it is not usable.", self.object)),
            _ => {}
        }
    }

    pub(super) fn address(&mut self, field: &str, text: &str) -> Option<IpAddr> {
        let Some(ip) = parse_ip(text) else {
            self.tell(field, &format!("{} is not an IP address, and is left out", quoted(text)));
            return None;
        };
        if let Some(reason) = unusable(ip) {
            self.tell(field, &format!("{text:?} is {reason}, and is left out"));
            return None;
        }
        Some(ip)
    }

    /// Returns the valid CIDRs. A range of all addresses is a mistake: it would admit every source.
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
                    self.tell(
                        &format!("{field}[{i}]"),
                        &format!("{} is not a CIDR, and is left out", quoted(text)),
                    );
                }
            }
        }
        cidrs
    }

    /// Returns the usable addresses, without duplicates, in order.
    pub(super) fn addresses(&mut self, field: &str, texts: &[String]) -> Vec<IpAddr> {
        let mut addresses = Vec::new();
        let mut seen = HashSet::new();
        for (i, text) in texts.iter().enumerate().filter(|(_, text)| !text.is_empty()) {
            if let Some(ip) = self.address(&format!("{field}[{i}]"), text)
                && seen.insert(ip)
            {
                addresses.push(ip);
            }
        }
        addresses
    }
}

/// Returns a value in quotation marks for a sentence, shortened to its beginning if it is long: an
/// annotation may have 256 KiB.
pub(super) fn quoted(text: &str) -> String {
    const MOST: usize = 80;
    match text.char_indices().nth(MOST) {
        None => format!("{text:?}"),
        Some((end, _)) => format!("{:?}… ({} bytes)", &text[..end], text.len()),
    }
}
