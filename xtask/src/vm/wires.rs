//! Network cards of machines and their connections: taps on bridges, in a network namespace of the
//! run's own.

use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::cargo;

/// The number of queue pairs of a card that is not under test: as many as a driver with two
/// processors needs for XDP.
const PLENTY: u32 = 4;

/// A virtio network card.
#[derive(Clone, Debug)]
pub(super) struct Card {
    /// The name of its tap in the namespace.
    pub(super) tap: String,
    /// The bridge that the tap is a port of.
    pub(super) bridge: String,
    pub(super) mac: String,
    /// The number of pairs of receive and transmit queues.
    pub(super) queues: u32,
    /// The MTU that the card offers its driver, in bytes.
    pub(super) mtu: u32,
    pub(super) offloads: Offloads,
}

/// The offloads of a card: checksums, segmentation, and the merging of received segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Offloads {
    On,
    Off,
    /// Enabled, and the driver cannot disable them.
    Fixed,
}

impl Card {
    /// Returns the arguments of qemu.
    fn arguments(&self) -> Vec<String> {
        let Self { tap, mac, queues, mtu, .. } = self;
        let vectors = 2 * queues + 2;
        let offloads = match self.offloads {
            Offloads::On => "",
            Offloads::Off => {
                ",csum=off,gso=off,guest_csum=off,guest_tso4=off,guest_tso6=off,guest_ecn=off,guest_ufo=off,host_tso4=off,host_tso6=off,host_ecn=off,host_ufo=off"
            }
            Offloads::Fixed => ",ctrl_guest_offloads=off",
        };
        [
            "-netdev".to_owned(),
            format!("tap,id={tap},ifname={tap},script=no,downscript=no,queues={queues}"),
            "-device".to_owned(),
            format!(
                "virtio-net-pci,netdev={tap},mac={mac},mq=on,vectors={vectors},host_mtu={mtu},romfile={offloads}"
            ),
        ]
        .into()
    }
}

/// Wires between pairs of cards of one machine: number, queue pairs and MTU of the node's end, and
/// its offloads. The other end belongs to the outside.
const PAIRS: [(u8, u32, u32, Offloads); 6] = [
    (0, PLENTY, 1500, Offloads::On),
    (1, 1, 1500, Offloads::On),
    (2, 2, 1500, Offloads::On),
    (3, PLENTY, 9000, Offloads::On),
    (4, PLENTY, 1500, Offloads::Off),
    (5, 1, 1500, Offloads::Fixed),
];

/// Returns the cards of [`PAIRS`].
pub(super) fn pairs() -> Vec<Card> {
    let mut cards = Vec::new();
    for (number, queues, mtu, offloads) in PAIRS {
        for (end, queues, offloads) in [(1, queues, offloads), (2, PLENTY, Offloads::On)] {
            cards.push(Card {
                tap: format!("w{number}e{end}"),
                bridge: format!("w{number}"),
                mac: format!("52:54:00:00:{number:02}:{end:02}"),
                queues,
                mtu,
                offloads,
            });
        }
    }
    cards
}

/// Describes [`PAIRS`] for the tests in the machine, which find the cards by their MAC addresses.
pub(super) fn description() -> String {
    let described = PAIRS.map(|(number, queues, mtu, offloads)| {
        let offloads = match offloads {
            Offloads::On => "",
            Offloads::Off => ",offloads=off",
            Offloads::Fixed => ",guest-offloads=fixed",
        };
        format!("{number}:queues={queues},mtu={mtu}{offloads}")
    });
    described.join(";")
}

/// A network namespace by its name, removed when this value is dropped, even if this program is
/// killed before.
pub(super) struct Namespace(pub(super) String);

impl Namespace {
    /// Makes the namespace, and leaves a process that removes it once this one is gone.
    pub(super) fn make(name: &str) -> Result<Self> {
        ip(&["netns", "add", name])?;
        let namespace = Self(name.to_owned());
        // The process has a session of its own, so that Ctrl-C only reaches this program.
        let watch = "while kill -0 \"$1\"; do sleep 1; done; ip netns delete \"$2\"";
        let mut command = cargo::privileged("setsid").context("neither root nor sudo")?;
        command.args(["sh", "-c", watch, "sh", &std::process::id().to_string(), name]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().context("setsid cannot be started")?;
        Ok(namespace)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if let Err(error) = ip(&["netns", "delete", &self.0]) {
            eprintln!("vm: the network namespace {} is left: {error:#}", self.0);
        }
    }
}

/// A namespace with bridges and taps.
pub(super) struct Wires {
    pub(super) netns: Namespace,
    cards: Vec<Card>,
}

impl Wires {
    /// Makes the namespace, its bridges and the taps of all cards.
    pub(super) fn make(netns: &str, cards: Vec<Card>) -> Result<Self> {
        let wires = Self { netns: Namespace::make(netns)?, cards };
        wires.inside(&["link", "set", "lo", "up"])?;
        for card in &wires.cards {
            let Card { tap, bridge, mtu, .. } = card;
            if wires.inside(&["link", "show", bridge]).is_err() {
                // Without snooping, multicast of neighbour discovery passes at once.
                let kind = ["type", "bridge", "mcast_snooping", "0", "forward_delay", "0"];
                wires.inside(&[&["link", "add", bridge][..], &kind].concat())?;
                wires.inside(&["link", "set", bridge, "up"])?;
            }
            let queues: &[&str] = if card.queues > 1 { &["multi_queue"] } else { &[] };
            wires.inside(&[&["tuntap", "add", "dev", tap, "mode", "tap", "vnet_hdr"], queues].concat())?;
            wires.inside(&["link", "set", tap, "mtu", &mtu.to_string(), "master", bridge, "up"])?;
        }
        Ok(wires)
    }

    /// Returns the arguments of qemu for all cards.
    pub(super) fn arguments<'a>(cards: impl IntoIterator<Item = &'a Card>) -> Vec<String> {
        cards.into_iter().flat_map(Card::arguments).collect()
    }

    pub(super) fn cards(&self) -> &[Card] {
        &self.cards
    }

    /// Runs `ip` in the namespace.
    pub(super) fn inside(&self, arguments: &[&str]) -> Result<()> {
        ip(&[&["-netns", &self.netns.0], arguments].concat())
    }
}

pub(super) fn ip(arguments: &[&str]) -> Result<()> {
    let mut command: Command = cargo::privileged("ip").context("neither root nor sudo")?;
    cargo::quietly(command.args(arguments)).with_context(|| format!("ip {}", arguments.join(" ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_are_told_the_same() {
        let cards = pairs();
        assert_eq!(cards.len(), 2 * PAIRS.len());
        assert!(description().starts_with("0:queues=4,mtu=1500;1:queues=1,"), "{}", description());
        assert!(description().ends_with("5:queues=1,mtu=1500,guest-offloads=fixed"));
        let card = &cards[10];
        assert_eq!((card.mac.as_str(), card.queues), ("52:54:00:00:05:01", 1));
        assert!(card.arguments()[3].ends_with(",ctrl_guest_offloads=off"));
    }
}
