//! `veth-peer`: an XDP program that passes every packet, on the ends of veths whose other ends are
//! served by XDP.

use anyhow::Result;
use clap::Args;
use traffic_policy_dataplane::{check_privileges, veth_peer};

use super::view;

/// Prepare veths whose other ends an agent serves by XDP in the driver, as nodes of kind can be.
///
/// To be called outside of the node, where the other end of its device is (a port of the container
/// engine's bridge), before an agent there runs with --attach xdp. Packets that XDP sends back on a
/// veth are lost unless this end has an XDP program, too: one that passes every packet is attached.
/// XDP also needs finished checksums: checksum offload is switched off for packets that this end
/// sends. Both last as long as the device, or until --detach.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(super) struct Arguments {
    /// Prepare these devices: all of them or, with an error, none.
    #[arg(long, num_args = 1.., value_name = "DEVICE")]
    attach: Vec<String>,
    /// Detach the program from these devices, and switch checksum offload on where it was on.
    #[arg(long, num_args = 1.., value_name = "DEVICE")]
    detach: Vec<String>,
}

impl Arguments {
    pub(super) fn execute(self) -> Result<()> {
        check_privileges()?;
        if self.attach.is_empty() {
            let done = veth_peer::detach(&self.detach)?;
            return view::print(|out| {
                for one in done {
                    let device = one.device;
                    match (one.changed, one.offload) {
                        (false, _) => writeln!(out, "{device}: no program to take off")?,
                        (true, true) => {
                            writeln!(out, "{device}: program taken off, checksum offload on again")?;
                        }
                        (true, false) => writeln!(out, "{device}: program taken off")?,
                    }
                    if one.still_served {
                        writeln!(
                            out,
                            "{device}: its other end still has an XDP program, and what that sends back is lost from now on: run its agent with --attach auto"
                        )?;
                    }
                }
                Ok(())
            });
        }
        let done = veth_peer::attach(&self.attach)?;
        view::print(|out| {
            for one in done {
                let device = one.device;
                match (one.changed, one.offload) {
                    (false, _) => writeln!(out, "{device}: prepared already")?,
                    (true, true) => writeln!(out, "{device}: program attached, checksum offload off")?,
                    (true, false) => {
                        writeln!(out, "{device}: program attached (checksum offload was off already)")?;
                    }
                }
            }
            Ok(())
        })
    }
}
