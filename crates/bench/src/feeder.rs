//! The feed: the programs that supply packets to the measured program, and floors as references.

use std::{
    num::NonZeroUsize,
    os::fd::AsFd,
    ptr::{self, NonNull},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use aya::{
    Ebpf, EbpfLoader, TestRun, TestRunOptions, TestRunResult,
    maps::{Array, HashMap, Map, MapData, ProgramArray},
    programs::{Program, ProgramFd, Xdp, XdpMode},
};
use nix::{
    sys::mman::{MapFlags, ProtFlags, mmap, munmap},
    time::{ClockId, clock_gettime},
};
use traffic_policy_bench_ebpf::{CiliumConnection, FRAME_LENGTH, FRAMES, Feed, FloorFlow, FloorFlow6};
use traffic_policy_dataplane::{load_programs, sk_buff, xdp_md};
use traffic_policy_ebpf::abi::{Address4, Address6, FlowKey, Tuple};

use super::{frame::Frame, object};

/// Hook of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hook {
    Xdp,
    /// TC, incoming packets.
    Ingress,
    /// TC, outgoing packets.
    Egress,
}

impl Hook {
    /// Returns the name used in rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Xdp => "XDP",
            Self::Ingress => "TC",
            Self::Egress => "TC egress",
        }
    }
}

/// Capacity of the feed and of the floor.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Frames that can be placed at a time.
    pub frames: u32,
    /// Entries of the floor's flows: as many as the packet path's, so that memory costs both the
    /// same.
    pub floor_flows: u32,
    /// The same for the floors of direct forwarding over IPv6, and for the tables of Katran's and
    /// Cilium's methods; few, as only rows of direct forwarding use them.
    pub direct_flows: u32,
}

/// The state that the feed restores before each packet, because the measured programs change it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restored {
    Nothing,
    /// The length, by bytes at the end.
    Tail,
    /// The same, by bytes in front, in XDP. (In TC the kernel puts a packet into another one only
    /// once: see [`Loaded::run_each`][super::Loaded::run_each].)
    Head,
}

impl Default for Room {
    fn default() -> Self {
        Self { frames: FRAMES, floor_flows: 262_144, direct_flows: 64 }
    }
}

/// Frames that were placed together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    first: u32,
    pub len: u32,
}

/// Number of frames placed so far.
#[derive(Clone, Copy, Debug)]
pub struct Mark(u32);

/// Result of a run.
#[derive(Clone, Debug)]
pub struct Took {
    /// Nanoseconds per packet, including the feed's, from the CPU time of the whole run: for long
    /// runs, where it resolves fractions.
    pub on_average: f64,
    /// The same as reported by the kernel, in whole nanoseconds: for short runs, whose preparation
    /// costs as much.
    pub by_kernel: f64,
    /// Verdict on the last packet.
    pub verdict: u32,
    pub packet: Vec<u8>,
}

/// The loaded feed, with its floors.
pub struct Feeder {
    object: Ebpf,
    /// The floor's flows.
    pub floor: HashMap<MapData, Tuple<Address4>, FloorFlow>,
    /// Those over IPv6, for the floors of direct forwarding.
    pub floor6: HashMap<MapData, FlowKey<Address6>, FloorFlow6>,
    /// The flows that Katran's method remembers.
    pub katran: HashMap<MapData, Tuple<Address4>, u64>,
    /// Those that Cilium's method remembers.
    pub cilium: HashMap<MapData, Tuple<Address4>, CiliumConnection>,
    frames: Frames,
    feed: Array<MapData, Feed>,
    xdp_subject: ProgramArray<MapData>,
    tc_subject: ProgramArray<MapData>,
    /// Index of the device that packets arrive on.
    ifindex: u32,
    restored: Restored,
    /// Number of zero bytes behind each frame.
    tail: usize,
}

impl Feeder {
    /// Loads the feed; packets will arrive on the device `ifindex` of this network namespace.
    pub fn load(ifindex: u32, room: &Room) -> Result<Self> {
        let mut loader = EbpfLoader::new();
        loader.map_max_entries("FRAMES", room.frames).map_max_entries("FLOOR_FLOWS", room.floor_flows);
        for map in ["FLOOR_FLOWS6", "KATRAN_LRU", "CILIUM_CONNECTIONS"] {
            loader.map_max_entries(map, room.direct_flows);
        }
        let mut object = object::load(&mut loader)?;
        load_programs(&mut object)?;
        Ok(Self {
            floor: take(&mut object, "FLOOR_FLOWS")?.try_into()?,
            floor6: take(&mut object, "FLOOR_FLOWS6")?.try_into()?,
            katran: take(&mut object, "KATRAN_LRU")?.try_into()?,
            cilium: take(&mut object, "CILIUM_CONNECTIONS")?.try_into()?,
            frames: Frames::new(take(&mut object, "FRAMES")?, room.frames)?,
            feed: take(&mut object, "FEED")?.try_into()?,
            xdp_subject: take(&mut object, "XDP_SUBJECT")?.try_into()?,
            tc_subject: take(&mut object, "TC_SUBJECT")?.try_into()?,
            object,
            ifindex,
            restored: Restored::Nothing,
            tail: 0,
        })
    }

    /// Attaches the feed to devices that no packet ever arrives on. Otherwise the kernel patches
    /// its XDP dispatcher for each run, and waits for all CPUs (`bpf_dispatcher_change_prog`):
    /// short runs would begin with cold caches.
    /// <https://github.com/torvalds/linux/blob/v6.12/kernel/bpf/dispatcher.c>
    pub fn keep_ready(&mut self, idle: [u32; 4]) -> Result<()> {
        let feeds = ["feed_xdp", "feed_resized_xdp", "feed_grown_xdp"];
        for (name, ifindex) in feeds.into_iter().zip(idle) {
            let program = self.object.program_mut(name).with_context(|| format!("no program {name}"))?;
            let program: &mut Xdp = program.try_into()?;
            program.attach_to_if_index(ifindex, XdpMode::Skb)?;
        }
        Ok(())
    }

    /// Returns one of the feed's own programs, to be run without the feed.
    pub(super) fn alone(&self, name: &str) -> Result<&Program> {
        self.object.program(name).with_context(|| format!("no program {name}"))
    }

    /// Takes a map of the floor.
    pub(super) fn take(&mut self, name: &str) -> Result<Map> {
        take(&mut self.object, name)
    }

    /// Returns one of the feed's own programs: a floor, or the empty program of a hook.
    pub fn program(&self, name: &str) -> Result<ProgramFd> {
        fd(&self.object, name)
    }

    /// Sets what is restored before each run of a program.
    pub fn restore(&mut self, restored: Restored) {
        self.restored = restored;
    }

    /// Puts this number of zero bytes behind each frame from now on. In XDP the bytes that do not
    /// fit in one page lie in further buffers; a test run of TC takes one page at most.
    pub fn lengthen(&mut self, bytes: usize) {
        self.tail = bytes;
    }

    /// Removes all frames.
    pub fn clear(&mut self) {
        self.frames.used = 0;
    }

    /// Returns the number of frames placed so far, for [`Self::rewind`].
    pub fn mark(&self) -> Mark {
        Mark(self.frames.used)
    }

    /// Removes the frames that were placed since the mark.
    pub fn rewind(&mut self, mark: Mark) {
        self.frames.used = mark.0;
    }

    /// Places packets behind the existing ones, to be sent in this order.
    pub fn place(&mut self, frames: &[Frame]) -> Result<Window> {
        self.frames.place(frames)
    }

    /// Runs a program once on each packet, without the feed. The kernel makes a new packet for each
    /// run, so that this serves programs whose changes cannot be undone; its work between two runs
    /// cools the caches.
    pub(super) fn each(&self, hook: Hook, program: &Program, frames: &[Vec<u8>]) -> Result<(Vec<f64>, Took)> {
        let mut times = Vec::with_capacity(frames.len());
        let mut last = Took { on_average: 0.0, by_kernel: 0.0, verdict: 0, packet: Vec::new() };
        for frame in frames {
            let context = match hook {
                Hook::Xdp => xdp_md(frame.len() as u32, self.ifindex).to_vec(),
                Hook::Ingress | Hook::Egress => sk_buff(self.ifindex, 0).to_vec(),
            };
            last.packet.resize(frame.len() + 256, 0);
            let options = TestRunOptions {
                data_in: Some(frame),
                data_out: Some(&mut last.packet),
                ctx_in: Some(&context),
                repeat: 1,
                ..TestRunOptions::default()
            };
            let result = test_run(program, options)?;
            last.packet.truncate(result.data_size_out as usize);
            last.verdict = result.return_value;
            last.by_kernel = result.duration.as_secs_f64() * 1e9;
            times.push(last.by_kernel);
        }
        last.on_average = times.iter().sum::<f64>() / times.len() as f64;
        Ok((times, last))
    }

    /// Runs a program on this number of packets of a window, starting with its first one, in a
    /// loop.
    pub fn run(&mut self, hook: Hook, program: &ProgramFd, window: Window, packets: u32) -> Result<Took> {
        let Window { first, len } = window;
        self.feed.set(0, Feed { next: first, first, end: first + len, zero: 0 }, 0)?;
        let length = FRAME_LENGTH + self.tail;
        let name = match (hook, self.restored) {
            (Hook::Xdp, Restored::Nothing) => "feed_xdp",
            (Hook::Xdp, Restored::Tail) => "feed_resized_xdp",
            (Hook::Xdp, Restored::Head) => "feed_grown_xdp",
            (Hook::Ingress | Hook::Egress, Restored::Nothing) => "feed_tc",
            (Hook::Ingress | Hook::Egress, Restored::Tail) => "feed_resized_tc",
            (Hook::Ingress | Hook::Egress, Restored::Head) => bail!("TC restores no bytes in front"),
        };
        let context = match hook {
            Hook::Xdp => xdp_md(length as u32, self.ifindex).to_vec(),
            Hook::Ingress | Hook::Egress => sk_buff(self.ifindex, 0).to_vec(),
        };
        match hook {
            Hook::Xdp => self.xdp_subject.set(0, program, 0)?,
            Hook::Ingress | Hook::Egress => self.tc_subject.set(0, program, 0)?,
        }
        let mut data = self.frames.get(first);
        data.resize(length, 0);
        // An answer may be longer than the packet by this much.
        let mut packet = vec![0; length + 256];
        let options = TestRunOptions {
            data_in: Some(&data),
            data_out: Some(&mut packet),
            ctx_in: Some(&context),
            repeat: packets,
            ..TestRunOptions::default()
        };
        let program = self.object.program(name).with_context(|| format!("no program {name}"))?;
        // The CPU time of this thread excludes what other threads run meanwhile.
        let started = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?;
        let result = test_run(program, options)?;
        let ended = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?;
        let all = Duration::from(ended) - Duration::from(started);
        packet.truncate(result.data_size_out as usize);
        Ok(Took {
            on_average: all.as_secs_f64() * 1e9 / f64::from(packets),
            by_kernel: result.duration.as_secs_f64() * 1e9,
            verdict: result.return_value,
            packet,
        })
    }
}

/// Runs a program of XDP or TC.
pub(super) fn test_run(program: &Program, options: TestRunOptions<'_>) -> Result<TestRunResult> {
    Ok(match program {
        Program::Xdp(program) => program.test_run(options)?,
        Program::SchedClassifier(program) => program.test_run(options)?,
        _ => bail!("a program of another type"),
    })
}

/// Returns a program of an object, as the target of a jump.
pub(super) fn fd(object: &Ebpf, name: &str) -> Result<ProgramFd> {
    match object.program(name).with_context(|| format!("no program {name}"))? {
        Program::Xdp(program) => Ok(program.fd()?.try_clone()?),
        Program::SchedClassifier(program) => Ok(program.fd()?.try_clone()?),
        _ => bail!("{name} is of another type"),
    }
}

fn take(object: &mut Ebpf, name: &str) -> Result<Map> {
    object.take_map(name).with_context(|| format!("no map {name}"))
}

/// The array of frames, mapped into memory: a system call for each of a million frames takes
/// seconds.
struct Frames {
    address: NonNull<Frame>,
    length: NonZeroUsize,
    capacity: u32,
    used: u32,
    _map: MapData,
}

// SAFETY: the memory belongs to this value, except for the programs, which run only while `Feeder`
// is borrowed.
unsafe impl Send for Frames {}

impl Frames {
    fn new(map: Map, capacity: u32) -> Result<Self> {
        let Map::Array(map) = map else { bail!("FRAMES is no array") };
        let length = NonZeroUsize::new(capacity as usize * FRAME_LENGTH).context("no room for a frame")?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: this is a new mapping at an address that the kernel chooses.
        let address = unsafe { mmap(None, length, protection, MapFlags::MAP_SHARED, map.fd().as_fd(), 0) }
            .context("mapping the frames into memory failed")?;
        Ok(Self { address: address.cast(), length, capacity, used: 0, _map: map })
    }

    fn place(&mut self, frames: &[Frame]) -> Result<Window> {
        let window = Window { first: self.used, len: u32::try_from(frames.len())? };
        let room = self.capacity - self.used;
        ensure!(window.len <= room, "{} frames, but room for {room}", frames.len());
        // SAFETY: the write is within the mapping, which holds `capacity` frames, as an array's
        // elements lie one after the other.
        unsafe {
            let first = self.address.as_ptr().add(window.first as usize);
            ptr::copy_nonoverlapping(frames.as_ptr(), first, frames.len());
        }
        self.used += window.len;
        Ok(window)
    }

    fn get(&self, index: u32) -> Vec<u8> {
        assert!(index < self.capacity, "frame {index} of {}", self.capacity);
        // SAFETY: the read is within the mapping, which holds `capacity` frames.
        super::frame::unpacked(&unsafe { ptr::read_volatile(self.address.as_ptr().add(index as usize)) })
    }
}

impl Drop for Frames {
    fn drop(&mut self) {
        // SAFETY: it was mapped in `new` with this length, and no reference into it is kept.
        let unmapped = unsafe { munmap(self.address.cast(), self.length.get()) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}
