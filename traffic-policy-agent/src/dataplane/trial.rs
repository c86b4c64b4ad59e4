//! A copy of the programs that notes its way, for `explain`: run by the kernel on packets that nobody sent, with flows,
//! next hops and counters of its own. Nothing on the node changes.

mod live;
mod offline;

use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use aya::{
    Btf, Ebpf,
    maps::{Array, HashMap, Map, MapData, PerCpuArray, PerCpuValues},
    programs::{SchedClassifier, TestRun, TestRunOptions, Xdp},
};
use traffic_policy_ebpf::{
    abi::{
        Affinity, AffinityKey, Bucket, Frontend, Range, SLOT_LOCAL, STEPS, SocketQuestion, Step, Trace, Usage,
    },
    outcome::Outcome,
};

use super::{
    kernel::Kernel,
    object::{Routes, load_copy},
    pinned::service_key,
    plan::FrontendId,
    programs::jumps,
    tables::{FromWire, Tables},
    verifier,
    words::{Words, state},
};
use crate::model::ServicePortKey;

/// Where a packet is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketHook {
    Xdp,
    Tc,
}

/// What the programs noted, and made of the packet.
#[derive(Clone, Debug)]
pub struct Judged {
    pub steps: Vec<Step>,
    pub outcome: Outcome,
    /// The frame as it leaves; empty for a socket.
    pub frame: Vec<u8>,
}

/// An endpoint of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub address: SocketAddr,
    /// On this node, by its `nodeName` or as the node's own address.
    pub local: bool,
}

/// A device that packets may come by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entrance {
    pub ifindex: u32,
    pub mac: [u8; 6],
    pub hook: PacketHook,
}

/// The copy.
pub struct Trial {
    object: Ebpf,
    tables: Tables,
    trace: Array<MapData, Trace>,
    question: Array<MapData, SocketQuestion>,
    buckets: PerCpuArray<MapData, Bucket>,
    affinity: HashMap<MapData, AffinityKey, Affinity>,
    /// The running packet path: looked at, never written.
    running: Option<Running>,
    entrances: Vec<Entrance>,
    cpus: usize,
}

/// What the copy must know of the running packet path from time to time.
struct Running {
    affinity: HashMap<MapData, AffinityKey, Affinity>,
    usage: Words<Usage>,
}

/// What the kernel may append to a frame: an ICMP error quotes it behind its own headers.
const ROOM: usize = 256;

impl Trial {
    fn load((mut object, btf): (Ebpf, Btf)) -> Result<Self> {
        verifier::load(&mut object, &btf)?;
        let mut tables = Tables::take(&mut object)?;
        jumps(&object, &mut tables)?;
        let mut take = |name: &str| -> Result<Map> {
            object.take_map(name).with_context(|| format!("the packet path has no map {name}"))
        };
        let (trace, question) = (take("TRACE")?.try_into()?, take("QUESTION")?.try_into()?);
        let (buckets, affinity) = (take("BUCKETS")?.try_into()?, take("AFFINITY")?.try_into()?);
        let cpus = aya::util::nr_cpus().map_err(|(file, error)| {
            anyhow::Error::from(error).context(format!("the number of CPUs is not known: {file}"))
        })?;
        Ok(Self {
            object,
            tables,
            trace,
            question,
            buckets,
            affinity,
            running: None,
            entrances: Vec::new(),
            cpus,
        })
    }

    /// Devices that packets come by; offline one that stands for all.
    pub fn entrances(&self) -> &[Entrance] {
        &self.entrances
    }

    /// Runs the programs of a hook on a frame that came by a device, as the first packet of its flow.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn packet(&mut self, hook: PacketHook, ifindex: u32, frame: &[u8]) -> Result<Judged> {
        self.begin()?;
        let mut out = vec![0; frame.len() + ROOM];
        let (name, xdp, skb) = match hook {
            PacketHook::Xdp => ("xdp_ingress", Some(xdp_context(frame.len() as u32, ifindex)), None),
            PacketHook::Tc => ("tc_ingress", None, Some(skb_context(ifindex))),
        };
        let options = TestRunOptions {
            data_in: Some(frame),
            data_out: Some(&mut out),
            ctx_in: xdp.as_ref().map(|c| &c[..]).or(skb.as_ref().map(|c| &c[..])),
            ..TestRunOptions::default()
        };
        let program =
            self.object.program(name).with_context(|| format!("the packet path has no program {name}"))?;
        let ran = if hook == PacketHook::Xdp {
            <&Xdp>::try_from(program)?.test_run(options)
        } else {
            <&SchedClassifier>::try_from(program)?.test_run(options)
        };
        let ran = ran.with_context(|| format!("running {name} on a packet failed"))?;
        out.truncate(ran.data_size_out as usize);
        self.end(out)
    }

    /// Asks what becomes of a call of a socket.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn socket(&mut self, question: SocketQuestion) -> Result<Judged> {
        self.begin()?;
        self.question.set(0, question, 0).context("writing the question failed")?;
        let frame = [0; 64];
        let options = TestRunOptions { data_in: Some(&frame), ..TestRunOptions::default() };
        let program =
            self.object.program("explain_socket").context("the packet path has no program explain_socket")?;
        <&Xdp>::try_from(program)?.test_run(options).context("running the decision for sockets failed")?;
        self.end(Vec::new())
    }

    /// Every packet is the first one.
    fn begin(&mut self) -> Result<()> {
        empty(&mut self.tables.v4.flows).context("forgetting flows failed")?;
        empty(&mut self.tables.v6.flows).context("forgetting flows failed")?;
        self.forget_usage();
        self.trace.set(0, Trace::default(), 0).context("emptying the trace failed")?;
        // As after a long silence: answers are not what is asked about.
        let buckets = PerCpuValues::try_from(vec![Bucket::default(); self.cpus])?;
        self.buckets.set(0, buckets, 0).context("filling the buckets failed")
    }

    /// No flow of the copy stands; whether replies of SNAT flows may come is as the running packet path has it.
    fn forget_usage(&mut self) {
        let snat_created = match &self.running {
            // SAFETY: the element is mapped as long as `running` lives.
            Some(running) => unsafe { running.usage.pointer().read_volatile() }.snat_created,
            None => 0,
        };
        let pending_created = self.tables.state.load(state::pending_swept);
        let usage = self.tables.usage.pointer();
        // SAFETY: the element is mapped as long as the tables live, and no program runs meanwhile.
        unsafe {
            let held = usage.read_volatile();
            usage.write_volatile(Usage { snat_created, pending_created, unconfirmed: [0; 2], ..held });
        }
    }

    fn end(&mut self, frame: Vec<u8>) -> Result<Judged> {
        empty(&mut self.affinity).context("forgetting clients failed")?;
        let trace = self.trace.get(&0, 0).context("reading the trace failed")?;
        let count = (trace.count as usize).min(STEPS);
        let steps = trace.steps[..count].to_vec();
        let outcome = steps
            .iter()
            .rev()
            .find(|step| step.kind == traffic_policy_ebpf::abi::step::OUTCOME)
            .and_then(|step| Outcome::ALL.iter().copied().find(|outcome| *outcome as u32 == step.value))
            .context("the programs did not say what became of the packet")?;
        Ok(Judged { steps, outcome, frame })
    }

    /// Lets the copy know where the running packet path sent this client last.
    ///
    /// # Errors
    /// The kernel refuses.
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

    /// Who has an index; `None` if nobody.
    pub fn service(&self, index: u32) -> Option<ServicePortKey> {
        self.tables.services.get(&index, 0).ok().map(|info| service_key(&info))
    }

    /// The endpoints of a list.
    ///
    /// # Errors
    /// The maps cannot be read.
    pub fn candidates(&self, ipv6: bool, range: Range) -> Result<Vec<Candidate>> {
        (range.base..range.base.saturating_add(range.len)).map(|index| self.endpoint(ipv6, index)).collect()
    }

    /// The endpoint in a slot.
    ///
    /// # Errors
    /// The maps cannot be read.
    pub fn endpoint(&self, ipv6: bool, index: u32) -> Result<Candidate> {
        let (address, port, flags) = if ipv6 {
            let slot = self.tables.v6.slots.get(&index, 0)?;
            (slot.address.to_ip(), slot.port, slot.flags)
        } else {
            let slot = self.tables.v4.slots.get(&index, 0)?;
            (slot.address.to_ip(), slot.port, slot.flags)
        };
        let address = SocketAddr::new(address, u16::from_be(port));
        Ok(Candidate { address, local: flags & SLOT_LOCAL != 0 })
    }

    /// The frontend at an address, as it lies in the maps.
    pub fn frontend(&self, id: &FrontendId) -> Option<Frontend> {
        super::store::frontend(&self.tables, id)
    }
}

fn empty<K: aya::Pod, V: aya::Pod>(map: &mut HashMap<MapData, K, V>) -> Result<()> {
    let keys: Vec<K> = map.keys().collect::<Result<_, _>>()?;
    for key in keys {
        map.remove(&key)?;
    }
    Ok(())
}

/// `struct xdp_md`: data_end at 4, ingress_ifindex at 12.
fn xdp_context(length: u32, ifindex: u32) -> [u8; 24] {
    let mut context = [0; 24];
    context[4..8].copy_from_slice(&length.to_ne_bytes());
    context[12..16].copy_from_slice(&ifindex.to_ne_bytes());
    context
}

/// `struct __sk_buff`: ifindex at 40.
fn skb_context(ifindex: u32) -> [u8; 192] {
    let mut context = [0; 192];
    context[40..44].copy_from_slice(&ifindex.to_ne_bytes());
    context
}
