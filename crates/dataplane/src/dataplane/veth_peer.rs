//! An XDP program that passes every packet, for the end of a veth whose other end is served by XDP
//! in the driver.
//!
//! A frame that XDP on the other end sends back through the veth (XDP_TX) only arrives if this end
//! has a program, too (`veth_xdp_flush` in drivers/net/veth.c), and frames that this end sends must
//! have finished checksums: XDP cannot recognise checksums that are left to a card. Checksum
//! offload is therefore switched off, and the program's name records whether it was on.

use std::{
    ffi::CString,
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use anyhow::{Context, Result, anyhow, bail};
use nix::net::if_::if_nametoindex;
use socket2::{Domain, Socket, Type};

use super::{introspect, sys};
use crate::node::veth::{Change, End, set_xdp};

/// The prefix of the program's names.
const NAME: &str = "tp_veth_pass";
/// The name of the program on a device that had checksum offload, which is to be switched on again.
const WITH_OFFLOAD: &str = "tp_veth_pass_tx";
/// The prefix of the names of the agent's own programs.
const AGENT: &str = "tp_xdp";

/// A device that was changed, or needed no change.
#[derive(Debug, PartialEq, Eq)]
pub struct Done {
    pub device: String,
    pub changed: bool,
    /// Whether checksum offload was switched off, or on again.
    pub offload: bool,
    /// Whether the other end continues to send by XDP after the program was detached.
    pub still_served: bool,
}

/// Whether a loaded program is the one that this module attaches.
#[must_use]
pub fn is_pass(program: u32) -> bool {
    introspect::program_name(program).is_some_and(|name| name == NAME || name == WITH_OFFLOAD)
}

/// Returns the devices of this network namespace with the program.
pub fn devices() -> io::Result<Vec<String>> {
    let ours = |end: &End| end.xdp.is_some_and(|xdp| is_pass(xdp.id));
    Ok(End::all()?.into_iter().filter(ours).map(|end| end.name).collect())
}

/// Attaches the program to devices: to all of them or to none.
///
/// # Errors
/// The error names the device, the cause and the remedy.
pub fn attach(names: &[String]) -> Result<Vec<Done>> {
    let ends = veths(names)?;
    let mut done: Vec<Done> = Vec::new();
    for end in &ends {
        match attach_one(end) {
            Ok(one) => done.push(one),
            Err(error) => {
                for (end, _) in ends.iter().zip(&done).filter(|(_, done)| done.changed) {
                    // The state of the device has changed since.
                    let end = End::of(end.index)?;
                    detach_one(&end).with_context(|| format!("{error:#}; and then"))?;
                }
                return Err(error);
            }
        }
    }
    Ok(done)
}

/// Detaches the program from devices, unless the check of one of them fails. A device that fails
/// later does not keep the others from being tried.
///
/// # Errors
/// The errors of all devices that failed; each names the device, the cause and the remedy.
pub fn detach(names: &[String]) -> Result<Vec<Done>> {
    each(&veths(names)?, detach_one)
}

/// Does the work for every device, and returns all errors in one, if there were any.
fn each(ends: &[End], work: impl FnMut(&End) -> Result<Done>) -> Result<Vec<Done>> {
    let (done, failed): (Vec<_>, Vec<_>) = ends.iter().map(work).partition(Result::is_ok);
    if failed.is_empty() {
        return done.into_iter().collect();
    }
    let errors = failed.into_iter().filter_map(Result::err).map(|error| format!("{error:#}"));
    bail!("{}", errors.collect::<Vec<_>>().join("; "))
}

/// Returns the devices, after checks that precede any change.
fn veths(names: &[String]) -> Result<Vec<End>> {
    let mut ends: Vec<End> = Vec::new();
    for name in names {
        let index = if_nametoindex(name.as_str());
        let index = index.map_err(|_| {
            anyhow!("there is no device {name} here: `ip link` lists those of this network namespace")
        })?;
        let end = End::of(index).with_context(|| format!("asking the kernel for {name} failed"))?;
        judge(&end, end.xdp.and_then(|xdp| introspect::program_name(xdp.id)).as_deref())?;
        if !ends.contains(&end) {
            ends.push(end);
        }
    }
    Ok(ends)
}

/// Checks whether a device may be changed; the error gives the reason why not. `program`: the name
/// of the XDP program on it.
fn judge(end: &End, program: Option<&str>) -> Result<()> {
    let name = &end.name;
    if !end.veth {
        bail!(
            "{name} is no veth: the program belongs on the veth whose other end an agent serves by XDP (`ip -d link show type veth`)"
        );
    }
    let Some(xdp) = end.xdp else { return Ok(()) };
    match program {
        Some(NAME | WITH_OFFLOAD) => Ok(()),
        Some(program) if program.starts_with(AGENT) => bail!(
            "an agent serves {name} itself by XDP ({program}, id {}): name the veth's other end, in the network namespace outside",
            xdp.id
        ),
        _ => {
            let program = program.map_or_else(String::new, |program| format!(" {program}"));
            let id = xdp.id;
            let enough = if xdp.driver {
                "; if it passes what is for the other end, nothing more is needed than checksum offload off"
            } else {
                ""
            };
            bail!(
                "another XDP program{program} (id {id}) is on {name}: take it off (`ip link set {name} xdp off`, or stop what attached it){enough}"
            )
        }
    }
}

fn attach_one(end: &End) -> Result<Done> {
    let offload = switch_offload(&end.name, None);
    let offload =
        offload.with_context(|| format!("asking for the checksum offload of {} failed", end.name))?;
    if end.xdp.is_some() {
        if offload {
            bail!(
                "{} has the program, and somebody has switched its checksum offload on since: `veth-peer --detach {0}`, then attach again",
                end.name
            );
        }
        return Ok(Done { device: end.name.clone(), changed: false, offload: false, still_served: false });
    }
    let program =
        load(if offload { WITH_OFFLOAD } else { NAME }).context("loading the XDP program failed")?;
    set_xdp(end.index, Change::Attach(program.as_fd())).map_err(|error| refusal(end, &error))?;
    if offload && let Err(error) = switch_offload(&end.name, Some(false)) {
        set_xdp(end.index, Change::Detach(program.as_fd())).ok();
        return Err(error)
            .with_context(|| format!("the checksum offload of {} cannot be switched off", end.name));
    }
    Ok(Done { device: end.name.clone(), changed: true, offload, still_served: false })
}

fn detach_one(end: &End) -> Result<Done> {
    let device = end.name.clone();
    let Some(xdp) = end.xdp else {
        return Ok(Done { device, changed: false, offload: false, still_served: false });
    };
    let offload = introspect::program_name(xdp.id).as_deref() == Some(WITH_OFFLOAD);
    let what = || format!("the program cannot be taken off {device}");
    let program = sys::program(xdp.id).with_context(what)?;
    set_xdp(end.index, Change::Detach(program.as_fd())).with_context(what)?;
    if offload {
        let switched = switch_offload(&device, Some(true));
        switched.with_context(|| {
            format!("the checksum offload of {device} cannot be switched on: `ethtool -K {device} tx on`")
        })?;
    }
    let still_served =
        end.other().is_ok_and(|other| other.xdp.is_some_and(|xdp| xdp.driver && !is_pass(xdp.id)));
    Ok(Done { device, changed: true, offload, still_served })
}

fn load(name: &str) -> io::Result<OwnedFd> {
    /// `enum bpf_prog_type`: BPF_PROG_TYPE_XDP
    const XDP: u32 = 6;
    /// BPF_F_XDP_HAS_FRAGS: without it a veth refuses a program if a frame of its other end does
    /// not fit into a page.
    const XDP_HAS_FRAGS: u32 = 1 << 5;
    // r0 = XDP_PASS; exit
    let code = [[0xb7, 0, 0, 0, 2, 0, 0, 0], [0x95, 0, 0, 0, 0, 0, 0, 0]];
    sys::load_named(name, XDP, &code, c"Dual MIT/GPL", XDP_HAS_FRAGS)
}

/// Explains why the kernel does not accept the program.
fn refusal(end: &End, error: &io::Error) -> anyhow::Error {
    let name = &end.name;
    let why = match error.raw_os_error() {
        Some(libc::ENOSPC) => format!(
            "it has fewer receive queues than its other end has send queues: `ethtool -L {name} rx N`"
        ),
        Some(libc::ENOTCONN) => "it has no other end: make the pair anew".to_owned(),
        Some(libc::EBUSY | libc::EEXIST) => {
            format!("another XDP program has come in between: `ip link show {name}`")
        }
        Some(libc::EPERM) => "not permitted: run as root".to_owned(),
        _ => error.to_string(),
    };
    anyhow!("{name} takes no XDP program: {why}")
}

/// Returns whether a device leaves the checksums of sent packets to a card, and switches that if
/// `to` is given.
fn switch_offload(device: &str, to: Option<bool>) -> io::Result<bool> {
    const SIOCETHTOOL: libc::Ioctl = 0x8946;
    // linux/ethtool.h
    const ETHTOOL_GTXCSUM: u32 = 0x16;
    const ETHTOOL_STXCSUM: u32 = 0x17;
    let name = CString::new(device)?;
    let command = if to.is_some() { ETHTOOL_STXCSUM } else { ETHTOOL_GTXCSUM };
    // The value is a struct ethtool_value.
    let mut value = [command, u32::from(to.unwrap_or_default())];
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)?;
    // SAFETY: an all-zero ifreq is a valid value of that plain C struct.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.as_bytes().len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.as_bytes()) {
        *to = from.cast_signed() as libc::c_char;
    }
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    // SAFETY: the request names a device and points to a value that outlives the call and has the
    // layout that both commands read and write.
    if unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(value[1] != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::veth::Xdp;

    #[test]
    fn what_is_left_alone_and_why() {
        let lo = End::of(if_nametoindex("lo").unwrap()).unwrap();
        let said = |end: &End, program| judge(end, program).unwrap_err().to_string();
        assert!(said(&lo, None).contains("lo is no veth"));
        let veth = |xdp| {
            let mut end = lo.clone();
            (end.name, end.veth, end.xdp) = ("veth7".to_owned(), true, xdp);
            end
        };
        judge(&veth(None), None).unwrap();
        let with = |driver| veth(Some(Xdp { id: 12, driver }));
        for ours in [NAME, WITH_OFFLOAD] {
            judge(&with(true), Some(ours)).unwrap();
        }
        let other = said(&with(true), Some("firewall"));
        assert!(other.contains("another XDP program firewall (id 12) is on veth7"), "{other}");
        assert!(other.contains("ip link set veth7 xdp off") && other.contains("nothing more is needed"));
        assert!(!said(&with(false), None).contains("nothing more is needed"));
        assert!(said(&with(true), Some("tp_xdp_ingress")).contains("name the veth's other end"));
    }

    #[test]
    fn each_refusal_has_its_fix() {
        let end = End::of(if_nametoindex("lo").unwrap()).unwrap();
        for (number, word) in [
            (libc::ENOSPC, "ethtool -L lo rx N"),
            (libc::ENOTCONN, "no other end"),
            (libc::EBUSY, "in between"),
            (libc::EPERM, "as root"),
            (libc::EINVAL, "os error 22"),
        ] {
            let said = refusal(&end, &io::Error::from_raw_os_error(number)).to_string();
            assert!(said.contains(word), "{number}: {said}");
        }
    }

    #[test]
    fn a_device_that_fails_does_not_keep_the_others() {
        let lo = End::of(if_nametoindex("lo").unwrap()).unwrap();
        let ends = ["veth1", "veth2", "veth3"].map(|name| {
            let mut end = lo.clone();
            end.name = name.to_owned();
            end
        });
        let mut tried = Vec::new();
        let failing = |end: &End| {
            tried.push(end.name.clone());
            if end.name == "veth3" {
                return Ok(Done {
                    device: end.name.clone(),
                    changed: true,
                    offload: false,
                    still_served: false,
                });
            }
            Err(anyhow!("{} refuses", end.name))
        };
        assert_eq!(each(&ends, failing).unwrap_err().to_string(), "veth1 refuses; veth2 refuses");
        assert_eq!(tried, ["veth1", "veth2", "veth3"]);
    }

    #[test]
    fn a_device_that_is_not_there_is_named() {
        let error = attach(&["no-such-device".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("no device no-such-device") && error.contains("ip link"), "{error}");
    }
}
