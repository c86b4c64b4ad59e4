//! A second CPU with packets of its own while the first one is measured.

use std::{
    panic::resume_unwind,
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
};

use anyhow::{Context, Result};
use aya::programs::ProgramFd;
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::{Pid, getpid, gettid},
};

use super::{
    feeder::{Feeder, Hook, Took, Window},
    fixture::BenchNode,
    loaded::{Loaded, Setup, Subject},
};

/// A feed for another CPU, and the packet path that it feeds.
pub struct Companion {
    packet_path: PacketPath,
    hook: Hook,
}

enum PacketPath {
    /// Both CPUs share its maps.
    Shared { feeder: Box<Feeder>, program: ProgramFd },
    /// The companion has maps of its own: then the CPUs share only the machine.
    Own(Box<Loaded>),
}

impl Companion {
    /// Makes a companion that shares the packet path of `loaded`.
    pub fn sharing(loaded: &Loaded, fixture: &BenchNode, hook: Hook) -> Result<Self> {
        let mut feeder = Box::new(Feeder::load(fixture.ifindex, &loaded.setup.room)?);
        feeder.keep_ready(fixture.idle[1])?;
        let program = loaded.fd(Subject::Ours(hook))?;
        Ok(Self { packet_path: PacketPath::Shared { feeder, program }, hook })
    }

    /// Makes a companion with a packet path and maps of its own, prepared by `prepare`.
    pub fn apart(
        fixture: &BenchNode,
        setup: Setup,
        hook: Hook,
        prepare: impl FnOnce(&mut Loaded),
    ) -> Result<Self> {
        let mut own = Box::new(Loaded::beside_another(fixture, setup, 2)?);
        prepare(&mut own);
        Ok(Self { packet_path: PacketPath::Own(own), hook })
    }

    pub fn feeder(&mut self) -> &mut Feeder {
        match &mut self.packet_path {
            PacketPath::Shared { feeder, .. } => feeder,
            PacketPath::Own(loaded) => &mut loaded.feeder,
        }
    }

    fn run(&mut self, window: Window, packets: u32) -> Result<Took> {
        match &mut self.packet_path {
            PacketPath::Shared { feeder, program } => feeder.run(self.hook, program, window, packets),
            PacketPath::Own(loaded) => loaded.run(Subject::Ours(self.hook), window, packets),
        }
    }

    /// Does work while another CPU has packets of this window, `packets` per run, again and again.
    /// `work` begins when the first run is over. Returns the runs except for the first and the last
    /// one, and the number of all packets.
    pub fn during<T>(
        &mut self,
        cpu: usize,
        window: Window,
        packets: u32,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<(T, Vec<Took>, u64)> {
        let stop = AtomicBool::new(false);
        let (begun, begins) = mpsc::channel();
        thread::scope(|scope| {
            let stop = &stop;
            let other = scope.spawn(move || -> Result<Vec<Took>> {
                stay(cpu)?;
                let mut runs = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    runs.push(self.run(window, packets)?);
                    // The receiver has been dropped only if `work` is done.
                    let _ = begun.send(());
                }
                Ok(runs)
            });
            // If it does not begin, it has failed.
            let worked = begins.recv().is_ok().then(work).transpose();
            stop.store(true, Ordering::Relaxed);
            let mut runs = other.join().unwrap_or_else(|panic| resume_unwind(panic))?;
            let worked = worked?.context("the other CPU has not begun")?;
            let all = runs.len() as u64 * u64::from(packets);
            runs.pop();
            Ok((worked, runs.split_off(1.min(runs.len())), all))
        })
    }
}

/// Returns a CPU of this process that the calling thread, which stays on one, does not use; `None`
/// if there is no other.
pub fn other_cpu() -> Result<Option<usize>> {
    let (all, own) = (sched_getaffinity(getpid())?, sched_getaffinity(gettid())?);
    let set = |cpus: &CpuSet, cpu: usize| cpus.is_set(cpu).unwrap_or(false);
    Ok((0..CpuSet::count()).find(|cpu| set(&all, *cpu) && !set(&own, *cpu)))
}

fn stay(cpu: usize) -> Result<()> {
    let mut one = CpuSet::new();
    one.set(cpu)?;
    sched_setaffinity(Pid::from_raw(0), &one).context("staying on one CPU failed")
}
