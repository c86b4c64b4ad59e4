//! Tail calls and pins of the loaded programs.

use std::{fs, io::ErrorKind, path::Path};

use anyhow::{Context as _, Result};
use aya::{
    Ebpf,
    maps::{MapData, ProgramArray},
    programs::{ProgramFd, ProgramInfo, SchedClassifier, Xdp},
};
use traffic_policy_ebpf::abi::jump;

use super::{
    attach::{Mode, cgroup, pod},
    loader::kernel_types,
    verifier,
};
use crate::dataplane::maps::{Maps, reader::Reader};

/// A hook of devices through which packets arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketHook {
    Xdp,
    Tc,
    /// TC ingress of the host side of a pod's device.
    Pod,
}

/// The programs of the XDP hook, and of TC, that others jump to, by their index.
const XDP_JUMPS: [(u32, &str); 12] = [
    (jump::SLOW_PATH, "tp_xdp_slow4"),
    (jump::REJECT, "tp_xdp_reject4"),
    (jump::ICMP_ERROR, "tp_xdp_icmp4"),
    (jump::VARIABLE_HEADERS, "tp_xdp_vhdr4"),
    (jump::OPEN_REPLY, "tp_xdp_openbk4"),
    (jump::SCTP, "tp_xdp_sctp4"),
    (jump::FAMILY + jump::SLOW_PATH, "tp_xdp_slow6"),
    (jump::FAMILY + jump::REJECT, "tp_xdp_reject6"),
    (jump::FAMILY + jump::ICMP_ERROR, "tp_xdp_icmp6"),
    (jump::FAMILY + jump::VARIABLE_HEADERS, "tp_xdp_vhdr6"),
    (jump::FAMILY + jump::OPEN_REPLY, "tp_xdp_openbk6"),
    (jump::FAMILY + jump::SCTP, "tp_xdp_sctp6"),
];
const TC_JUMPS: [(u32, &str); 24] = [
    (jump::SLOW_PATH, "tp_tc_slow4"),
    (jump::REJECT, "tp_tc_reject4"),
    (jump::ICMP_ERROR, "tp_tc_icmp4"),
    (jump::VARIABLE_HEADERS, "tp_tc_vhdr4"),
    (jump::ICMP_ERROR_OUT, "tp_tc_icmp_out4"),
    (jump::VARIABLE_HEADERS_OUT, "tp_tc_vhdr_out4"),
    (jump::WITH_ETHERNET, "tp_tc_ingress"),
    (jump::SPLIT, "tp_tc_split4"),
    (jump::OPEN, "tp_tc_open4"),
    (jump::OPEN_REPLY, "tp_tc_openback4"),
    (jump::SCTP, "tp_tc_sctp4"),
    (jump::SCTP_OUT, "tp_tc_sctp_out4"),
    (jump::SCTP_SPLIT, "tp_tc_sctp_cut4"),
    (jump::FAMILY + jump::SLOW_PATH, "tp_tc_slow6"),
    (jump::FAMILY + jump::REJECT, "tp_tc_reject6"),
    (jump::FAMILY + jump::ICMP_ERROR, "tp_tc_icmp6"),
    (jump::FAMILY + jump::VARIABLE_HEADERS, "tp_tc_vhdr6"),
    (jump::FAMILY + jump::ICMP_ERROR_OUT, "tp_tc_icmp_out6"),
    (jump::FAMILY + jump::VARIABLE_HEADERS_OUT, "tp_tc_vhdr_out6"),
    (jump::PRIORITY_TAG, "tp_tc_priority"),
    (jump::FAMILY + jump::OPEN, "tp_tc_open6"),
    (jump::FAMILY + jump::OPEN_REPLY, "tp_tc_openback6"),
    (jump::FAMILY + jump::SCTP, "tp_tc_sctp6"),
    (jump::FAMILY + jump::SCTP_OUT, "tp_tc_sctp_out6"),
];

/// The programs in the place of SCTP's, as long as this node serves no SCTP.
const XDP_NO_SCTP: [(u32, &str); 2] =
    [(jump::SCTP, "tp_xdp_nosctp4"), (jump::FAMILY + jump::SCTP, "tp_xdp_nosctp6")];
const TC_NO_SCTP: [(u32, &str); 2] =
    [(jump::SCTP, "tp_tc_nosctp4"), (jump::FAMILY + jump::SCTP, "tp_tc_nosctp6")];

/// The programs of TC on devices without Ethernet.
const L3_JUMPS: [(u32, &str); 9] = [
    (jump::REJECT, "tp_tc_reject4"),
    (jump::WITH_ETHERNET, "tp_tc_ingress"),
    (jump::ICMP_ERROR_OUT, "tp_l3_icmp_out4"),
    (jump::VARIABLE_HEADERS_OUT, "tp_l3_vhdr_out4"),
    (jump::SCTP_OUT, "tp_l3_sctp_out4"),
    (jump::FAMILY + jump::REJECT, "tp_tc_reject6"),
    (jump::FAMILY + jump::ICMP_ERROR_OUT, "tp_l3_icmp_out6"),
    (jump::FAMILY + jump::VARIABLE_HEADERS_OUT, "tp_l3_vhdr_out6"),
    (jump::FAMILY + jump::SCTP_OUT, "tp_l3_sctp_out6"),
];

/// The programs at pods' devices (`--pod-services on`): their own where packets create flows, and
/// those of TC for the rest.
const POD_JUMPS: [(u32, &str); 17] = [
    (jump::SLOW_PATH, "tp_pod_slow4"),
    (jump::REJECT, "tp_tc_reject4"),
    (jump::ICMP_ERROR, "tp_tc_icmp4"),
    (jump::VARIABLE_HEADERS, "tp_pod_vhdr4"),
    (jump::ICMP_ERROR_OUT, "tp_tc_icmp_out4"),
    (jump::VARIABLE_HEADERS_OUT, "tp_tc_vhdr_out4"),
    (jump::LOCAL_DELIVERY, pod::DIRECT),
    (jump::SPLIT, "tp_tc_split4"),
    (jump::SCTP, "tp_pod_sctp4"),
    (jump::SCTP_SPLIT, "tp_tc_sctp_cut4"),
    (jump::FAMILY + jump::SLOW_PATH, "tp_pod_slow6"),
    (jump::FAMILY + jump::REJECT, "tp_tc_reject6"),
    (jump::FAMILY + jump::ICMP_ERROR, "tp_tc_icmp6"),
    (jump::FAMILY + jump::VARIABLE_HEADERS, "tp_pod_vhdr6"),
    (jump::FAMILY + jump::ICMP_ERROR_OUT, "tp_tc_icmp_out6"),
    (jump::FAMILY + jump::VARIABLE_HEADERS_OUT, "tp_tc_vhdr_out6"),
    (jump::FAMILY + jump::SCTP, "tp_pod_sctp6"),
];

/// The entry programs, which are pinned for others to run.
pub const ENTRIES: [&str; 3] = ["tp_xdp_ingress", "tp_tc_ingress", "tp_tc_egress"];

/// The program that stands for those of sockets when `explain` runs a copy of the packet path.
pub const EXPLAINED_CALL: &str = "tp_explain_sock";

/// The name of the array of the programs that those of TC jump to.
pub const TC_CALLS: &str = "tp_tc_calls";

/// The programs that an agent needs.
#[derive(Clone, Copy, Debug)]
pub struct Selection {
    /// If XDP is attached to no device, no program jumps to the XDP ones, which are a third of what
    /// the verifier walks. The entry program is pinned nevertheless.
    pub mode: Mode,
    /// Whether SCTP is served.
    pub sctp: bool,
    /// Whether packets of other nodes are opened.
    pub direct: bool,
    /// Whether devices without Ethernet are served.
    pub l3: bool,
    /// Whether the calls of sockets are translated (`--cgroup`).
    pub sockets: bool,
    /// Whether packets go straight to pods (`--local-delivery direct`).
    pub pods: bool,
    /// Whether what pods send to Services is translated at their devices (`--pod-services on`).
    pub pod_services: bool,
}

/// Whether a program is for pods' devices with `--pod-services on` alone.
fn is_of_pod_services(name: &str) -> bool {
    name.starts_with("tp_pod_")
}

/// Whether a program is for devices without Ethernet alone.
fn is_of_l3(name: &str) -> bool {
    name.starts_with("tp_l3_")
}

impl Selection {
    /// Every program of an agent.
    const ALL: Self = Self {
        mode: Mode::Auto,
        sctp: true,
        direct: true,
        l3: true,
        sockets: true,
        pods: true,
        pod_services: true,
    };

    /// Whether a program is one of them.
    pub fn needs(self, name: &str) -> bool {
        let is_in = |jumps: &[(u32, &str)]| jumps.iter().any(|(_, jump)| *jump == name);
        let is_xdp = is_in(&XDP_JUMPS) || is_in(&XDP_NO_SCTP);
        let stands_in = is_in(&XDP_NO_SCTP) || is_in(&TC_NO_SCTP);
        let of_its_kind = if self.sctp { !stands_in } else { !is_of_sctp(name) };
        let is_wanted = name != EXPLAINED_CALL
            && (self.direct || !is_of_opening(name))
            && (self.l3 || !is_of_l3(name))
            && (self.sockets || !cgroup::is_program(name))
            && (self.pods || name != pod::DIRECT)
            && (self.pod_services || !is_of_pod_services(name));
        of_its_kind && is_wanted && (self.mode != Mode::Tc || !is_xdp)
    }

    /// Returns the programs of `jumps` and of `stand_ins` that are needed.
    fn of(
        self,
        jumps: &[(u32, &'static str)],
        stand_ins: &[(u32, &'static str)],
    ) -> Vec<(u32, &'static str)> {
        jumps.iter().chain(stand_ins).copied().filter(|(_, name)| self.needs(name)).collect()
    }
}

/// Whether a program is one of SCTP's own, not one that stands in for it.
pub fn is_of_sctp(name: &str) -> bool {
    is_at(name, &[jump::SCTP, jump::SCTP_OUT, jump::SCTP_SPLIT])
}

/// Whether a program opens packets of other nodes.
fn is_of_opening(name: &str) -> bool {
    is_at(name, &[jump::OPEN, jump::OPEN_REPLY])
}

/// Whether others jump to a program by one of these indices, of either family.
fn is_at(name: &str, indices: &[u32]) -> bool {
    let all = XDP_JUMPS.iter().chain(&TC_JUMPS).chain(&L3_JUMPS).chain(&POD_JUMPS);
    all.into_iter().any(|(index, jump)| *jump == name && indices.contains(&(index % jump::FAMILY)))
}

/// Whether an earlier agent has put a program in place that those of TC jump to by this index.
/// `folder`: its pins.
pub fn is_in_place(folder: &Path, index: u32) -> bool {
    // An element without a program cannot be read.
    Reader::open(folder, TC_CALLS).and_then(|jumps| jumps.value::<u32>(index)).is_ok()
}

/// Verifies and loads every program of an object.
pub fn load_programs(object: &mut Ebpf) -> Result<()> {
    verifier::load(object, &kernel_types()?).map(drop)
}

/// Returns the entry programs that are pinned in `folder` and whose instructions differ from the
/// object's, according to the kernel's hash of them. A program that is not pinned does not count.
pub fn differing(object: &Ebpf, folder: &Path) -> Vec<&'static str> {
    let differs = |name: &&str| {
        let pinned = ProgramInfo::from_pin(folder.join(name)).ok();
        let own = object.program(name).and_then(|program| program.info().ok());
        pinned.zip(own).is_some_and(|(pinned, own)| pinned.tag() != own.tag())
    };
    ENTRIES.into_iter().filter(differs).collect()
}

/// Returns the programs that others jump to: hook (`xdp`, `tc`, `l3`, `pod`), index, name.
pub fn jump_table() -> impl Iterator<Item = (&'static str, u32, &'static str)> {
    let of = |hook: &'static str| move |(index, name): (u32, &'static str)| (hook, index, name);
    let (xdp, tc) = (XDP_JUMPS.into_iter().map(of("xdp")), TC_JUMPS.into_iter().map(of("tc")));
    let pod = POD_JUMPS.into_iter().map(of("pod"));
    xdp.chain(tc).chain(L3_JUMPS.into_iter().map(of("l3"))).chain(pod)
}

/// Installs the programs that others jump to. Those of an earlier agent are replaced one by one;
/// old and new ones work together because their layout version is the same.
pub fn jumps(object: &Ebpf, maps: &mut Maps) -> Result<()> {
    jumps_needed(object, maps, Selection::ALL)
}

/// Installs the programs of a node that serves no SCTP, in the places that no other agent has
/// filled.
pub fn jumps_without_sctp(object: &Ebpf, maps: &mut Maps) -> Result<()> {
    jumps_needed(object, maps, Selection { sctp: false, ..Selection::ALL })
}

/// Installs the programs of a node that opens no packets of other nodes, in the places that no
/// other agent has filled.
pub fn jumps_without_opening(object: &Ebpf, maps: &mut Maps) -> Result<()> {
    jumps_needed(object, maps, Selection { direct: false, ..Selection::ALL })
}

/// Installs the programs like [`jumps`], but only the selected ones. The others stay as an earlier
/// agent installed them: its XDP programs, which remain attached until this agent's devices are,
/// continue unchanged.
pub fn jumps_needed(object: &Ebpf, maps: &mut Maps, selection: Selection) -> Result<()> {
    put_in_place(&mut maps.xdp_jumps, object, &selection.of(&XDP_JUMPS, &XDP_NO_SCTP))?;
    put_in_place(&mut maps.tc_jumps, object, &selection.of(&TC_JUMPS, &TC_NO_SCTP))?;
    put_in_place(&mut maps.l3_jumps, object, &selection.of(&L3_JUMPS, &[]))?;
    if !selection.pod_services {
        return Ok(());
    }
    put_in_place(&mut maps.pod_jumps, object, &selection.of(&POD_JUMPS, &[]))?;
    if !selection.pods {
        // That of an earlier agent; there may be none.
        let _ = maps.pod_jumps.clear_index(&jump::LOCAL_DELIVERY);
    }
    Ok(())
}

/// Loads those of `wanted` that `held` lacks, puts them in place, and returns their number; `held`
/// is what is in place then.
///
/// # Errors
/// The kernel refuses one, or one cannot be put in place: none of them is held then.
pub fn extend(object: &mut Ebpf, maps: &mut Maps, held: &mut Selection, wanted: Selection) -> Result<usize> {
    let before = *held;
    let lacking = |name: &str| wanted.needs(name) && !before.needs(name);
    let in_place = verifier::load_those(object, &kernel_types()?, lacking).and_then(|number| {
        jumps_needed(object, maps, wanted)?;
        Ok(number)
    });
    if in_place.is_err() {
        // Some may be loaded. They would serve nothing, and take memory and descriptors.
        verifier::unload_those(object, lacking);
    }
    let number = in_place?;
    *held = wanted;
    Ok(number)
}

/// Installs the programs like [`jumps`], but only those that [`of_ingress`] selects.
pub fn jumps_of_ingress(
    object: &Ebpf,
    maps: &mut Maps,
    hook: PacketHook,
    ipv6: bool,
    sctp: bool,
) -> Result<()> {
    let jumps: Vec<_> = of_ingress(hook, ipv6, sctp).collect();
    match hook {
        PacketHook::Xdp => put_in_place(&mut maps.xdp_jumps, object, &jumps),
        PacketHook::Tc => put_in_place(&mut maps.tc_jumps, object, &jumps),
        PacketHook::Pod => put_in_place(&mut maps.pod_jumps, object, &jumps),
    }
}

/// Returns the programs that the entry program of a hook may jump to for packets of an address
/// family: index, name. `sctp`: those of SCTP alone, instead of all others.
pub fn of_ingress(hook: PacketHook, ipv6: bool, sctp: bool) -> impl Iterator<Item = (u32, &'static str)> {
    let jumps: &[_] = match hook {
        PacketHook::Xdp => &XDP_JUMPS,
        PacketHook::Tc => &TC_JUMPS,
        PacketHook::Pod => &POD_JUMPS,
    };
    let comes_in = move |index: u32| {
        (index >= jump::FAMILY) == ipv6
            && ![
                jump::ICMP_ERROR_OUT,
                jump::VARIABLE_HEADERS_OUT,
                jump::SCTP_OUT,
                jump::WITH_ETHERNET,
                jump::FAMILY + jump::ICMP_ERROR_OUT,
                jump::FAMILY + jump::VARIABLE_HEADERS_OUT,
                jump::FAMILY + jump::SCTP_OUT,
                jump::PRIORITY_TAG,
            ]
            .contains(&index)
    };
    jumps.iter().copied().filter(move |(index, name)| comes_in(*index) && is_of_sctp(name) == sctp)
}

fn put_in_place(table: &mut ProgramArray<MapData>, object: &Ebpf, jumps: &[(u32, &str)]) -> Result<()> {
    for (index, name) in jumps {
        let put = |table: &mut ProgramArray<MapData>| anyhow::Ok(table.set(*index, &fd(object, name)?, 0)?);
        put(table).with_context(|| format!("{name} cannot be put in place"))?;
    }
    Ok(())
}

/// Pins the entry programs by their names in `folder`. Each one of an earlier agent is replaced in
/// one step.
pub fn pin(object: &mut Ebpf, folder: &Path) -> Result<()> {
    for name in ENTRIES {
        let program =
            object.program_mut(name).with_context(|| format!("the packet path has no program {name}"))?;
        // A bpffs allows no dot in a name.
        let (path, next) = (folder.join(name), folder.join(format!("{name}-next")));
        match fs::remove_file(&next) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("{} cannot be removed", next.display()));
            }
            _ => {}
        }
        program.pin(&next).with_context(|| format!("{} cannot be pinned", next.display()))?;
        fs::rename(&next, &path).with_context(|| format!("{} cannot be put in place", path.display()))?;
    }
    Ok(())
}

fn fd(object: &Ebpf, name: &str) -> Result<ProgramFd> {
    let program = object.program(name).with_context(|| format!("the packet path has no program {name}"))?;
    let xdp: Result<&Xdp, _> = program.try_into();
    let fd = match xdp {
        Ok(program) => program.fd()?.try_clone()?,
        Err(_) => {
            let program: &SchedClassifier = program.try_into()?;
            program.fd()?.try_clone()?
        }
    };
    Ok(fd)
}
