//! The machine's pairs of network cards, as the command that booted it describes them.

use std::env;
use std::io::Write;
use std::process::Command;

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use traffic_policy_testing::netns::Namespace;
use traffic_policy_testing::pace::poll;

const VARIABLE: &str = "TRAFFIC_POLICY_WIRES";
/// The time limit for the kernel, which returns the cards of a namespace some time after its end,
/// and frees programs asynchronously.
const PATIENCE: Duration = Duration::from_secs(2);

/// Two connected cards. The properties are those of the node's end; the end outside has the same
/// MTU, four pairs of queues and all offloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wire {
    pub number: u8,
    /// The number of pairs of queues.
    pub queues: u32,
    /// The largest MTU of the card, in bytes.
    pub mtu: u32,
    /// Whether checksums and segmentation may be left to the card, and by it to its driver.
    pub offloads: bool,
    /// Whether the driver cannot switch these offloads off.
    pub fixed: bool,
}

/// One of the two cards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Node = 1,
    Outside = 2,
}

impl Wire {
    /// Returns the wires with these numbers; `None`, with a printed message, where there are no
    /// wires at all.
    pub fn find<const N: usize>(test: &str, numbers: [u8; N]) -> Option<[Self; N]> {
        let Ok(text) = env::var(VARIABLE) else {
            let skipped =
                format!("SKIPPED {test}: needs the network cards of `cargo xtask vm test drivers`\n");
            // Written to stderr directly: the test harness would capture it otherwise.
            std::io::stderr().write_all(skipped.as_bytes()).unwrap();
            return None;
        };
        let wires = parse(&text).unwrap_or_else(|error| panic!("{VARIABLE}: {error:#}"));
        let find = |number| wires.iter().find(|wire| wire.number == number).copied();
        Some(numbers.map(|number| find(number).unwrap_or_else(|| panic!("no wire {number} in {text}"))))
    }

    fn mac(self, end: End) -> String {
        format!("52:54:00:00:{:02}:{:02}", self.number, end as u8)
    }

    /// Moves a card from the machine into a namespace, as the device `name`, which is set up.
    pub fn plug(self, end: End, namespace: &Namespace, name: &str) -> Result<()> {
        let mac = self.mac(end);
        let found = poll(PATIENCE, || device_with(&mac).transpose())
            .with_context(|| format!("no network card {mac} in the machine; is its driver loaded?"))??;
        ip(None, &["link", "set", "dev", &found, "down"])?;
        ip(None, &["link", "set", "dev", &found, "netns", namespace.name(), "name", name])?;
        let mtu = self.mtu.to_string();
        ip(Some(namespace), &["link", "set", "dev", name, "mtu", &mtu])?;
        ip(Some(namespace), &["link", "set", "dev", name, "up"])
    }

    /// Returns a card to the machine.
    pub fn unplug(self, end: End, namespace: &Namespace, name: &str) -> Result<()> {
        // A program that is about to be freed would move with it.
        poll(PATIENCE, || has_xdp(namespace, name).map(|has| (!has).then_some(())).transpose())
            .transpose()?;
        let kept = format!("w{}e{}", self.number, end as u8);
        ip(Some(namespace), &["link", "set", "dev", name, "down"])?;
        ip(Some(namespace), &["link", "set", "dev", name, "netns", "1", "name", &kept])
    }
}

fn has_xdp(namespace: &Namespace, name: &str) -> Result<bool> {
    let link = links(Some(namespace), &["dev", name])?;
    Ok(link.iter().any(|link| link["xdp"].is_object()))
}

/// The machine's own device with a MAC address.
fn device_with(mac: &str) -> Result<Option<String>> {
    let links = links(None, &[])?;
    let found = links.iter().find(|link| link["address"] == mac);
    Ok(found.and_then(|link| link["ifname"].as_str()).map(str::to_owned))
}

fn links(namespace: Option<&Namespace>, which: &[&str]) -> Result<Vec<Value>> {
    let output = run(namespace, "ip", &[&["-j", "link", "show"], which].concat())?;
    serde_json::from_slice(&output).context("`ip -j link` prints no JSON")
}

/// Runs `ip` in a namespace, or in the machine's own.
pub fn ip(namespace: Option<&Namespace>, arguments: &[&str]) -> Result<()> {
    run(namespace, "ip", arguments).map(drop)
}

/// Runs a program in a namespace, or in the machine's own, and returns its output.
pub fn run(namespace: Option<&Namespace>, program: &str, arguments: &[&str]) -> Result<Vec<u8>> {
    let mut command = Command::new(program);
    command.args(arguments);
    let output = match namespace {
        Some(namespace) => namespace.output(command)?,
        None => command.output()?,
    };
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {}: {}", arguments.join(" "), said.trim());
    Ok(output.stdout)
}

/// Parses `0:queues=4,mtu=1500;1:queues=1,mtu=9000,offloads=off;…`.
fn parse(text: &str) -> Result<Vec<Wire>> {
    let one = |text: &str| {
        let (number, properties) = text.split_once(':').context("no number")?;
        let mut wire = Wire { number: number.parse()?, queues: 0, mtu: 0, offloads: true, fixed: false };
        for property in properties.split(',') {
            match property.split_once('=') {
                Some(("queues", value)) => wire.queues = value.parse()?,
                Some(("mtu", value)) => wire.mtu = value.parse()?,
                Some(("offloads", "off")) => wire.offloads = false,
                Some(("guest-offloads", "fixed")) => wire.fixed = true,
                _ => bail!("{property:?} is not known"),
            }
        }
        Ok(wire)
    };
    text.split(';').map(|text| one(text).with_context(|| format!("the wire {text:?}"))).collect()
}

#[test]
fn wires_are_read() {
    let wires = parse("0:queues=4,mtu=1500;5:queues=1,mtu=9000,offloads=off,guest-offloads=fixed").unwrap();
    let plain = Wire { number: 0, queues: 4, mtu: 1500, offloads: true, fixed: false };
    assert_eq!(wires, [plain, Wire { number: 5, queues: 1, mtu: 9000, offloads: false, fixed: true }]);
    for wrong in ["", "0", "x:queues=1", "0:queues=many", "0:colour=red"] {
        assert!(parse(wrong).is_err(), "{wrong:?}");
    }
    assert_eq!(wires[1].mac(End::Outside), "52:54:00:00:05:02");
}
