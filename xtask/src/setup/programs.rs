//! What writes rules of nftables and iptables: wanted by the bench alone, which says of each row that it cannot measure why.

use super::{plan::Step, step};
use crate::cargo;

/// Programs, and the packages of Debian and Ubuntu that bring them.
const PROGRAMS: [(&str, &str); 2] = [("nft", "nftables"), ("iptables-restore", "iptables")];

/// Installs what is missing, where there is apt and the right to use it.
pub(crate) fn prepare() {
    // Not everyone has it in PATH.
    let there =
        |name: &str| cargo::find(name).is_some() || std::path::Path::new("/usr/sbin").join(name).exists();
    let missing = PROGRAMS.iter().filter(|(name, _)| !there(name));
    let packages: Vec<String> = missing.map(|(_, package)| (*package).to_owned()).collect();
    if packages.is_empty() {
        return;
    }
    let names = packages.join(" ");
    if cargo::find("apt-get").is_none() || !(cargo::is_root() || cargo::find("sudo").is_some()) {
        println!("setup: not installed: {names}; without them kube-proxy's rules are not measured");
        return;
    }
    for step in [Step::AptUpdate, Step::AptInstall(packages)] {
        println!("setup: {step} …");
        if let Err(error) = step::carry_out(&step) {
            println!("setup: that failed, so kube-proxy's rules are not all measured: {error:#}");
        }
    }
}
