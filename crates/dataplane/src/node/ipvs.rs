//! The kernel's table of ipvs, with which kube-proxy serves in that mode: /proc/net/ip_vs.

use std::{fmt, fs, io};

use nix::net::if_::if_nametoindex;

/// The device to which kube-proxy assigns the Services' addresses in this mode.
pub const DEVICE: &str = "kube-ipvs0";
/// The table of this process's network namespace.
const TABLE: &str = "/proc/self/net/ip_vs";

/// The content of the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ipvs {
    pub virtual_servers: usize,
    /// The established TCP connections.
    pub active: u64,
    /// The TCP connections that are being set up or are over, and the UDP flows.
    pub inactive: u64,
}

impl Ipvs {
    /// Reads the table; returns `None` if there is no ipvs, or it serves nothing.
    pub fn read() -> io::Result<Option<Self>> {
        match fs::read_to_string(TABLE) {
            Ok(text) => Ok(Some(Self::parse(&text)).filter(|ipvs| ipvs.virtual_servers > 0)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Parses the format of `ip_vs_info_seq_show` in net/netfilter/ipvs/ip_vs_ctl.c: a line for
    /// each virtual server, and below it one for each endpoint, with its connections in the last
    /// two columns.
    pub fn parse(text: &str) -> Self {
        let mut ipvs = Self::default();
        for line in text.lines() {
            let words: Vec<_> = line.split_whitespace().collect();
            match words[..] {
                ["TCP" | "UDP" | "SCTP" | "FWM", ..] => ipvs.virtual_servers += 1,
                ["->", .., active, inactive] => {
                    // The head of the table has words in these columns.
                    let number = |word: &str| word.parse::<u64>().unwrap_or_default();
                    ipvs.active += number(active);
                    ipvs.inactive += number(inactive);
                }
                _ => {}
            }
        }
        ipvs
    }
}

/// Returns a sentence about the connections that a take-over from conntrack leaves out on a node
/// where kube-proxy has served with ipvs; `None` on others.
pub fn not_adopted() -> Option<String> {
    if_nametoindex(DEVICE).ok()?;
    let held = match Ipvs::read() {
        Ok(Some(ipvs)) => ipvs.to_string(),
        Ok(None) => "its table lists none now".to_owned(),
        Err(error) => format!("{TABLE} cannot be read: {error}"),
    };
    Some(format!(
        "connections that ipvs holds (kube-proxy has served in mode ipvs: {DEVICE} is here; {held}): they end when its virtual servers are removed"
    ))
}

impl fmt::Display for Ipvs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { virtual_servers, active, inactive } = self;
        write!(
            f,
            "ipvs holds {active} established TCP connections and {inactive} others (UDP flows, TCP that begins or ends) of {virtual_servers} virtual servers"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_of_both_families() {
        let text = "IP Virtual Server version 1.2.1 (size=4096)\n\
            Prot LocalAddress:Port Scheduler Flags\n  -> RemoteAddress:Port Forward Weight ActiveConn InActConn\n\
            TCP  0A600001:01BB rr\n  -> AC12000B:192B      Masq    1      3          1         \n\
            UDP  [fd00:0010:0096:0000:0000:0000:0000:000a]:0035 rr persistent 10800\n\
            \x20 -> [fd00:0010:0244:0001:0000:0000:0000:0002]:0035      Masq    1      0          7         \n\
            \x20 -> [fd00:0010:0244:0001:0000:0000:0000:0003]:0035      Masq    0      2          0         \n";
        assert_eq!(Ipvs::parse(text), Ipvs { virtual_servers: 2, active: 5, inactive: 8 });
        let empty: String = text.lines().take(3).fold(String::new(), |all, line| all + line + "\n");
        assert_eq!(Ipvs::parse(&empty), Ipvs::default());
        assert_eq!(Ipvs::parse("nonsense\n-> x"), Ipvs::default());
    }
}
