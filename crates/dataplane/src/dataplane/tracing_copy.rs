//! A copy of the programs that records a trace: the kernel runs it on synthetic packets, with its
//! own flows, next hops and counters. Nothing on the node changes.

use std::path::Path;

use anyhow::{Context as _, Result};
use aya::{
    Btf, Ebpf,
    maps::{Array, HashMap, Map, MapData, PerCpuArray, PerCpuValues},
};
use traffic_policy_ebpf::{
    abi::{
        Affinity, AffinityKey, PROTOCOL_TCP, PROTOCOL_UDP, PacketTrace, RejectBucket, SocketQuestion,
        TRACE_STEPS, TraceStep, step,
    },
    outcome::Outcome,
};

pub use super::bpf::programs::PacketHook;
use super::{
    bpf::{
        loader::{self, Routes},
        programs, test_run, verifier,
    },
    kernel::Kernel,
    maps::Maps,
};

/// The steps that the programs recorded, and their outcome for the packet.
#[derive(Clone, Debug)]
pub struct Judged {
    pub steps: Vec<TraceStep>,
    pub outcome: Outcome,
    /// The frame as it leaves; empty for a socket.
    pub frame: Vec<u8>,
}

/// The EtherType of IPv6, as it is in a frame.
const IPV6: [u8; 2] = 0x86dd_u16.to_be_bytes();
/// The offsets in a frame of the protocol of IPv4, and of the next header of IPv6.
const IPV4_PROTOCOL: usize = 14 + 9;
const IPV6_NEXT_HEADER: usize = 14 + 6;

/// The entry program of pods' devices.
const FROM_POD: &str = "tp_pod_ingress";

/// The programs that are verified and loaded when the first question needs them: one question needs
/// a quarter of the verifier's work for all programs (0.4 of 1.5 s of CPU on a busy machine of two
/// CPUs).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// The programs that packets of TCP and UDP may pass, of a hook and an address family.
    Ingress(PacketHook, bool),
    /// Those that SCTP and other protocols pass in addition.
    Sctp(PacketHook, bool),
    Sockets,
}

/// The copy of the programs, with its maps.
pub struct TracingCopy {
    object: Ebpf,
    btf: Btf,
    loaded: Vec<Part>,
    /// The maps: the copy's own, and those that it shares with the running packet path.
    pub maps: Maps,
    trace: Array<MapData, PacketTrace>,
    question: Array<MapData, SocketQuestion>,
    buckets: PerCpuArray<MapData, RejectBucket>,
    affinity: HashMap<MapData, AffinityKey, Affinity>,
    /// The running packet path, which is read and never written.
    running: Option<Running>,
    cpus: usize,
}

/// The maps of the running packet path that the copy reads from time to time.
struct Running {
    affinity: HashMap<MapData, AffinityKey, Affinity>,
}

impl TracingCopy {
    /// Creates the copy with its own maps, except for those of `shared` that are pinned in `pins`,
    /// and loads the entry programs. The others are loaded when a question needs them.
    ///
    /// # Errors
    /// A shared map is not pinned, privileges are missing, or the kernel refuses.
    pub fn load(pins: Option<&Path>, shared: &dyn Fn(&str) -> bool, routes: Routes) -> Result<Self> {
        let (mut object, btf) = loader::load_copy(pins, shared, routes, &Kernel::running()?)?;
        verifier::load_those(&mut object, &btf, |name| programs::ENTRIES.contains(&name))?;
        let maps = Maps::take(&mut object)?;
        let mut take = |name: &str| -> Result<Map> {
            object.take_map(name).with_context(|| format!("the packet path has no map {name}"))
        };
        let (trace, question) = (take("tp_trace")?.try_into()?, take("tp_explain_call")?.try_into()?);
        let (buckets, affinity) = (take("tp_reject_limit")?.try_into()?, take("tp_affinity")?.try_into()?);
        let cpus = aya::util::nr_cpus().map_err(|(file, error)| {
            anyhow::Error::from(error).context(format!("the number of CPUs is not known: {file}"))
        })?;
        let loaded = Vec::new();
        Ok(Self { object, btf, loaded, maps, trace, question, buckets, affinity, running: None, cpus })
    }

    /// Returns the entry programs pinned in `folder` that differ from the copy's.
    pub fn differing(&self, folder: &Path) -> Vec<&'static str> {
        programs::differing(&self.object, folder)
    }

    /// Follows the clients of the running packet path whose maps are pinned in `maps`.
    pub fn follow(&mut self, maps: &Path) -> Result<()> {
        let affinity = MapData::from_pin(maps.join("tp_affinity")).context("tp_affinity is not pinned")?;
        self.running = Some(Running { affinity: HashMap::try_from(Map::LruHashMap(affinity))? });
        Ok(())
    }

    /// Runs the programs of a hook on a frame that arrived on a device, as the first packet of its
    /// flow.
    pub fn packet(&mut self, hook: PacketHook, ifindex: u32, frame: &[u8]) -> Result<Judged> {
        let ipv6 = frame.get(12..14) == Some(&IPV6);
        self.need(Part::Ingress(hook, ipv6))?;
        let protocol = frame.get(if ipv6 { IPV6_NEXT_HEADER } else { IPV4_PROTOCOL });
        if !protocol.is_some_and(|number| [PROTOCOL_TCP, PROTOCOL_UDP].contains(&u32::from(*number))) {
            self.need(Part::Sctp(hook, ipv6))?;
        }
        self.begin()?;
        let frame = match hook {
            PacketHook::Xdp => test_run::xdp(&self.object, "tp_xdp_ingress", frame, ifindex),
            PacketHook::Tc => test_run::tc(&self.object, "tp_tc_ingress", frame, ifindex),
            PacketHook::Pod => test_run::tc(&self.object, FROM_POD, frame, ifindex),
        }?;
        self.end(frame)
    }

    /// Runs the program of sockets for a call.
    pub fn socket(&mut self, question: SocketQuestion) -> Result<Judged> {
        self.need(Part::Sockets)?;
        self.begin()?;
        self.question.set(0, question, 0).context("writing the question failed")?;
        test_run::xdp_without_frame(&self.object, programs::EXPLAINED_CALL)?;
        self.end(Vec::new())
    }

    fn need(&mut self, part: Part) -> Result<()> {
        if self.loaded.contains(&part) {
            return Ok(());
        }
        match part {
            Part::Ingress(hook, ipv6) => self.need_jumps(hook, ipv6, false)?,
            Part::Sctp(hook, ipv6) => self.need_jumps(hook, ipv6, true)?,
            Part::Sockets => {
                verifier::load_those(&mut self.object, &self.btf, |name| name == programs::EXPLAINED_CALL)?;
            }
        }
        self.loaded.push(part);
        Ok(())
    }

    fn need_jumps(&mut self, hook: PacketHook, ipv6: bool, sctp: bool) -> Result<()> {
        let mut wanted: Vec<_> = programs::of_ingress(hook, ipv6, sctp).map(|(_, jump)| jump).collect();
        if hook == PacketHook::Pod {
            wanted.push(FROM_POD);
        }
        // Programs of TC serve pods' devices, too, and may be loaded for them already.
        wanted.retain(|name| self.object.program(name).is_some_and(|program| program.fd().is_err()));
        verifier::load_those(&mut self.object, &self.btf, |name| wanted.contains(&name))?;
        programs::jumps_of_ingress(&self.object, &mut self.maps, hook, ipv6, sctp)
    }

    /// Resets the state, so that every packet is the first one.
    fn begin(&mut self) -> Result<()> {
        empty(&mut self.maps.v4.flows).context("forgetting flows failed")?;
        empty(&mut self.maps.v6.flows).context("forgetting flows failed")?;
        self.trace.set(0, PacketTrace::default(), 0).context("emptying the trace failed")?;
        // The buckets are full, as after a long silence: rate limits on replies are not part of the
        // question.
        let buckets = PerCpuValues::try_from(vec![RejectBucket::default(); self.cpus])?;
        self.buckets.set(0, buckets, 0).context("filling the buckets failed")
    }

    fn end(&mut self, frame: Vec<u8>) -> Result<Judged> {
        empty(&mut self.affinity).context("forgetting clients failed")?;
        let trace = self.trace.get(&0, 0).context("reading the trace failed")?;
        let count = (trace.count as usize).min(TRACE_STEPS);
        let steps = trace.steps[..count].to_vec();
        let outcome = steps
            .iter()
            .rev()
            .find(|step| step.kind == step::OUTCOME)
            .and_then(|step| Outcome::ALL.iter().copied().find(|outcome| *outcome as u32 == step.value))
            .context("the programs did not say what became of the packet")?;
        Ok(Judged { steps, outcome, frame })
    }

    /// Copies the affinity with the endpoint to which the running packet path sent this client
    /// last; returns whether there is one.
    pub fn remember_client(&mut self, client: [u64; 2], kind: u16, service: u32) -> Result<bool> {
        let Some(running) = &self.running else { return Ok(false) };
        let mut known = false;
        for list in [0, 1] {
            let key = AffinityKey { client, service, list, kind };
            if let Ok(held) = running.affinity.get(&key, 0) {
                self.affinity.insert(key, held, 0).context("remembering a client failed")?;
                known = true;
            }
        }
        Ok(known)
    }
}

fn empty<K: aya::Pod, V: aya::Pod>(map: &mut HashMap<MapData, K, V>) -> Result<()> {
    let keys: Vec<K> = map.keys().collect::<Result<_, _>>()?;
    for key in keys {
        map.remove(&key)?;
    }
    Ok(())
}
