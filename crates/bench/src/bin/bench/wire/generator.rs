//! Sends packets, and counts those that arrive.

use std::{
    collections::BTreeMap,
    net::Ipv4Addr,
    os::fd::{AsFd, AsRawFd},
    thread::sleep,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use aya::{
    Ebpf, EbpfLoader, TestRun, TestRunAttrs, TestRunOptions,
    maps::{Array, HashMap, Map, MapData, PerCpuArray},
    programs::{Program, TcAttachType, Xdp},
};
use traffic_policy_bench::{
    fixture::MAC,
    frame::{Content, frame, packed, unpacked},
    object,
};
use traffic_policy_bench_ebpf::{
    FRAME_LENGTH, FloorFlow,
    traffic::{Arrived, BATCH, FIRST_PORT, Generator, PORTS_SHIFT, Sink, TCP_SUM, UDP_SUM, sink},
};
use traffic_policy_dataplane::{ToWire, load_programs, xdp_md};
use traffic_policy_ebpf::abi::{Address, Address4, Port, Tuple};
use traffic_policy_testing::{
    netlink::{Mac, index},
    netns::Namespace,
};

use super::{
    cpu::stay,
    fixture::{END, ENDPOINTS, NODE, SENDERS},
};

pub(crate) const NODE_PORT: u16 = 30_080;
pub(crate) const TARGET_PORT: u16 = 8_080;

/// Mask of the networks of senders and endpoints.
const NETWORK: Ipv4Addr = Ipv4Addr::new(255, 255, 0, 0);

/// Path of a flood, which determines the expected result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path4 {
    /// A request to a node port, which arrives at an endpoint with the node as its source.
    NodePort,
    /// A request sent directly to an endpoint, from the client.
    Direct,
    /// A request to a node port that arrives at the pod with this source, or with the client's.
    Pod(Option<Ipv4Addr>),
}

/// Packets to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Send {
    Openings,
    Requests,
    Datagrams,
    /// Datagrams of the endpoint to its clients, as answers to theirs, with these MAC addresses:
    /// source, destination.
    Replies([Mac; 2]),
}

/// The programs at both ends of the wire, and the floor.
pub(crate) struct Traffic {
    programs: Ebpf,
    generator: Array<MapData, Generator>,
    sink: Array<MapData, Sink>,
    arrived: PerCpuArray<MapData, u64>,
    pub(crate) floor: HashMap<MapData, Tuple<Address4>, FloorFlow>,
    /// The device by which clients confirm connections.
    confirmed_by: Sink,
    /// All packets are sent, forwarded and counted on this CPU.
    pub(crate) cpu: usize,
    /// Notes for the report.
    pub(crate) notes: BTreeMap<String, String>,
    pub(crate) losses: Vec<String>,
}

/// Packets that arrived, by [`Arrived`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts([u64; Arrived::COUNT]);

impl Counts {
    pub(crate) fn of(&self, arrived: Arrived) -> u64 {
        self.0[arrived as usize]
    }
}

/// One flood.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) took: Duration,
    pub(crate) sent: u64,
    /// Duration of the bursts of a paced run, until all their packets had arrived.
    pub(crate) busy: Duration,
    pub(crate) counts: Counts,
}

impl Traffic {
    pub(crate) fn load(cpu: usize) -> Result<Self> {
        let mut loader = EbpfLoader::new();
        // The feed's map has no part in this, nor has Katran's method.
        loader.map_max_entries("FRAMES", 1).map_max_entries("KATRAN_LRU", 64);
        let mut programs = object::load(&mut loader)?;
        load_programs(&mut programs)?;
        Ok(Self {
            generator: take(&mut programs, "GENERATOR")?.try_into()?,
            sink: take(&mut programs, "SINK")?.try_into()?,
            arrived: take(&mut programs, "ARRIVED")?.try_into()?,
            floor: take(&mut programs, "FLOOR_FLOWS")?.try_into()?,
            programs,
            confirmed_by: Sink::default(),
            cpu,
            notes: BTreeMap::new(),
            losses: Vec::new(),
        })
    }

    /// Attaches one of the programs to a device in native mode.
    pub(crate) fn attach(&self, program: &str, namespace: &Namespace, device: &str) -> Result<()> {
        let fd = self.program(program)?.fd()?.as_fd().as_raw_fd();
        namespace.netlink(async |net| net.attach_xdp(device, fd).await)
    }

    /// Makes clients confirm connections by the device that sends to the node, wherever an answer
    /// came from.
    pub(crate) fn confirm_by_the_wire(&mut self, client: &Namespace) -> Result<()> {
        let [a, b, c, d, e, f] = MAC;
        let device = client.run(|| index(END))?;
        let (mac, mac_tail) = (u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, 0, 0]));
        self.confirmed_by = Sink { device, mac, mac_tail, ..Sink::default() };
        Ok(())
    }

    /// Attaches the sink of a pod to its device, where packets come in.
    pub(crate) fn attach_pod(&mut self, namespace: &Namespace, device: &str) -> Result<()> {
        let program = self.programs.program_mut("sink_tc").context("no program sink_tc")?;
        let Program::SchedClassifier(program) = program else { bail!("sink_tc is of another type") };
        namespace.run(|| program.attach(device, TcAttachType::Ingress)).context("attaching sink_tc")?;
        Ok(())
    }

    fn program(&self, name: &str) -> Result<&Xdp> {
        match self.programs.program(name).with_context(|| format!("no program {name}"))? {
            Program::Xdp(program) => Ok(program),
            _ => bail!("{name} is of another type"),
        }
    }

    /// Sets the next packets, of `count` flows from the first one on, and the sink's handling of
    /// them.
    pub(crate) fn aim(&mut self, to: Path4, send: Send, count: u32, flags: u32) -> Result<()> {
        let destination = match to {
            Path4::NodePort | Path4::Pod(_) => (NODE, NODE_PORT),
            Path4::Direct => (later(ENDPOINTS, 1), TARGET_PORT),
        };
        let content = match send {
            Send::Openings => Content::Syn,
            Send::Requests => Content::Ack,
            Send::Datagrams | Send::Replies(_) => Content::Datagram,
        };
        let packets = match send {
            Send::Replies(macs) => replies(macs, (later(ENDPOINTS, 1), TARGET_PORT), content, count)?,
            _ => generator(destination, content, count)?,
        };
        self.generator.set(0, packets, 0)?;
        let all = Ipv4Addr::BROADCAST;
        let (source, source_mask) = match to {
            Path4::NodePort => (NODE, all),
            Path4::Pod(Some(source)) => (source, all),
            Path4::Pod(None) | Path4::Direct => (SENDERS, NETWORK),
        };
        let sink = Sink {
            flags,
            clients: SENDERS.to_wire().wire(),
            client_mask: NETWORK.to_wire().wire(),
            endpoints: ENDPOINTS.to_wire().wire(),
            endpoint_mask: NETWORK.to_wire().wire(),
            source: source.to_wire().wire(),
            source_mask: source_mask.to_wire().wire(),
            frontend: destination.0.to_wire().wire(),
            frontend_port: Port::from_host(destination.1),
            target_port: Port::from_host(TARGET_PORT),
            ..self.confirmed_by
        };
        Ok(self.sink.set(0, sink, 0)?)
    }

    /// Sets a rate in packets per second, with bursts of at most [`BATCH`].
    pub(crate) fn pace(&mut self, rate: f64, burst_length: u32) -> Result<()> {
        let generator = self.generator.get(&0, 0)?;
        let interval = (f64::from(burst_length) * 1e9 / rate) as u64;
        Ok(self.generator.set(0, Generator { interval, burst_length, ..generator }, 0)?)
    }

    fn set_flags(&mut self, flags: u32) -> Result<()> {
        let sink = self.sink.get(&0, 0)?;
        Ok(self.sink.set(0, Sink { flags, ..sink }, 0)?)
    }

    /// Runs this number of turns: sends packets without a pause, or at the set pace. Then waits
    /// until no more packets arrive, and returns the counts.
    pub(crate) fn flood(&mut self, client: &Namespace, turns: u32) -> Result<Run> {
        self.flood_by(client, END, turns)
    }

    /// Floods as [`Self::flood`] does, by this device.
    pub(crate) fn flood_by(&mut self, namespace: &Namespace, device: &str, turns: u32) -> Result<Run> {
        let before = self.begin(turns)?;
        namespace.run(|| self.send_by(device, turns))?;
        let ended = self.generator.get(&0, 0)?.ended;
        let mut seen = self.counts()?;
        loop {
            sleep(Duration::from_millis(1));
            let now = self.counts()?;
            if now.0 == seen.0 {
                break;
            }
            seen = now;
        }
        self.end(before, Duration::from_nanos(ended))
    }

    /// Resets the clock of a run with this number of turns. The returned counts of earlier packets
    /// are for [`Self::end`].
    pub(crate) fn begin(&mut self, turns: u32) -> Result<Counts> {
        let generator = self.generator.get(&0, 0)?;
        let generator = Generator {
            turn: 0,
            turns: turns.into(),
            started: 0,
            ended: 0,
            due: 0,
            since: 0,
            busy: 0,
            sent: 0,
            burst: 0,
            ..generator
        };
        self.generator.set(0, generator, 0)?;
        self.counts()
    }

    /// Returns the result of a run that ended at this time (CLOCK_MONOTONIC).
    pub(crate) fn end(&self, before: Counts, ended: Duration) -> Result<Run> {
        let Generator { started, sent, busy, .. } = self.generator.get(&0, 0)?;
        let took = ended.saturating_sub(Duration::from_nanos(started));
        let mut counts = self.counts()?;
        for (count, before) in counts.0.iter_mut().zip(before.0) {
            *count -= before;
        }
        Ok(Run { took, busy: Duration::from_nanos(busy), sent, counts })
    }

    /// Opens flows by their handshake, then sends one packet of each and requires that all arrive
    /// with correct checksums.
    pub(crate) fn open(&mut self, client: &Namespace, to: Path4, flows: u32) -> Result<()> {
        self.aim(to, Send::Openings, flows, sink::ANSWER | sink::CONFIRM | sink::VERIFY)?;
        let run = self.flood(client, flows)?;
        for arrived in [Arrived::Opening, Arrived::Answer, Arrived::Request] {
            let number = run.counts.of(arrived);
            ensure!(number == u64::from(flows), "{flows} handshakes, {number} {arrived:?}: {:?}", run.counts);
        }
        self.aim(to, Send::Requests, flows, sink::VERIFY)?;
        self.verify(client, flows, Arrived::Request)?;
        self.set_flags(0)
    }

    /// Sends one packet of each flow, all of which must arrive.
    pub(crate) fn verify(&mut self, client: &Namespace, flows: u32, wanted: Arrived) -> Result<()> {
        let run = self.flood(client, flows)?;
        ensure!(
            run.counts.of(wanted) == u64::from(flows),
            "{flows} packets sent to the node, but arrived: {:?}",
            run.counts
        );
        Ok(())
    }

    /// Runs this number of turns on the flood's CPU. It is to be called in a thread of its own in
    /// the clients' namespace.
    pub(crate) fn send(&self, turns: u32) -> Result<()> {
        self.send_by(END, turns)
    }

    fn send_by(&self, device: &str, turns: u32) -> Result<()> {
        stay(0, self.cpu)?;
        let device = index(device)?;
        let context = xdp_md(FRAME_LENGTH as u32, device);
        let options = TestRunOptions {
            data_in: Some(&[0; FRAME_LENGTH]),
            ctx_in: Some(&context),
            repeat: turns,
            attrs: TestRunAttrs::new().xdp_live_frames(BATCH.min(turns)),
            ..TestRunOptions::default()
        };
        self.program("generate")?.test_run(options).context("sending")?;
        Ok(())
    }

    fn counts(&self) -> Result<Counts> {
        let mut counts = Counts::default();
        for (index, count) in counts.0.iter_mut().enumerate() {
            *count = self.arrived.get(&(index as u32), 0)?.iter().sum();
        }
        Ok(counts)
    }
}

fn take(object: &mut Ebpf, name: &str) -> Result<Map> {
    object.take_map(name).with_context(|| format!("no map {name}"))
}

/// Returns the client of a flow.
pub(crate) fn client(flow: u32) -> (Ipv4Addr, u16) {
    let port = FIRST_PORT + (flow & ((1 << PORTS_SHIFT) - 1)) as u16;
    (later(later(SENDERS, 1), flow >> PORTS_SHIFT), port)
}

pub(crate) fn later(address: Ipv4Addr, number: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(address) + number)
}

/// Returns the packets of clients to one destination.
fn generator(destination: (Ipv4Addr, u16), content: Content, count: u32) -> Result<Generator> {
    let template = frame((Ipv4Addr::UNSPECIFIED, 0).into(), destination.into(), content)?;
    Ok(packets(unpacked(&template), destination.0, content, count))
}

/// Returns the packets of an endpoint to its clients.
fn replies([from, to]: [Mac; 2], source: (Ipv4Addr, u16), content: Content, count: u32) -> Result<Generator> {
    let mut bytes = unpacked(&frame(source.into(), (Ipv4Addr::UNSPECIFIED, 0).into(), content)?);
    bytes[..6].copy_from_slice(&to);
    bytes[6..12].copy_from_slice(&from);
    Ok(Generator { to_clients: 1, ..packets(bytes, source.0, content, count) })
}

/// Returns the packets that are made of a frame without a client. `other`: its only address.
fn packets(mut bytes: Vec<u8>, other: Ipv4Addr, content: Content, count: u32) -> Generator {
    let template = packed(&bytes);
    bytes[24..26].fill(0);
    let (protocol, sum_at) = if content == Content::Datagram { (17, UDP_SUM) } else { (6, TCP_SUM) };
    bytes[sum_at as usize..][..2].fill(0);
    let sum = |bytes: &[u8]| -> u64 {
        bytes.chunks_exact(2).map(|word| u64::from(u16::from_ne_bytes([word[0], word[1]]))).sum()
    };
    let segment = (FRAME_LENGTH - 34) as u16;
    Generator {
        template,
        ip_sum: sum(&bytes[14..34]),
        l4_sum: sum(&bytes[34..]) + other.to_wire().sum() + sum(&[0, protocol]) + sum(&segment.to_be_bytes()),
        sum_at,
        client: u32::from(later(SENDERS, 1)),
        count,
        ..Generator::default()
    }
}
