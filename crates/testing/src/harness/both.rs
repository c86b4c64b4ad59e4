//! Packets on two CPUs at the same time, and packets that all run on one.

use std::sync::Barrier;
use std::thread;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use super::{Harness, Input};

/// Runs `work` on one CPU, where its packets find the state that the packet path keeps for each
/// CPU.
pub fn on_one_cpu<T>(work: impl FnOnce() -> T) -> T {
    let this = Pid::from_raw(0);
    let usable = sched_getaffinity(this).unwrap_or_else(|error| panic!("CPUs: {error}"));
    let cpu = (0..CpuSet::count()).find(|cpu| usable.is_set(*cpu).unwrap_or(false)).expect("no CPU");
    let mut one = CpuSet::new();
    one.set(cpu)
        .and_then(|()| sched_setaffinity(this, &one))
        .unwrap_or_else(|error| panic!("staying on CPU {cpu}: {error}"));
    let result = work();
    sched_setaffinity(this, &usable).unwrap_or_else(|error| panic!("leaving CPU {cpu}: {error}"));
    result
}

impl Harness {
    /// Runs two lists of frames at once, each in order on a CPU of its own, and returns how many of
    /// each were not passed to the stack; `None` on a machine with one CPU.
    pub fn at_once(&self, lists: [&[Input]; 2]) -> Option<[usize; 2]> {
        let usable = sched_getaffinity(Pid::from_raw(0)).unwrap_or_else(|error| panic!("CPUs: {error}"));
        let mut cpus = (0..CpuSet::count()).filter(|cpu| usable.is_set(*cpu).unwrap_or(false));
        let cpus = [cpus.next()?, cpus.next()?];
        let (object, start) = (&self.loaded.object, Barrier::new(2));
        let indices =
            lists.map(|list| list.iter().map(|input| self.ifindex(input.device)).collect::<Vec<_>>());
        Some(thread::scope(|scope| {
            let start = &start;
            let mut number = 0;
            let threads = lists.map(|list| {
                let (cpu, indices) = (cpus[number], &indices[number]);
                number += 1;
                scope.spawn(move || {
                    let mut one = CpuSet::new();
                    one.set(cpu)
                        .and_then(|()| sched_setaffinity(Pid::from_raw(0), &one))
                        .unwrap_or_else(|error| panic!("staying on CPU {cpu}: {error}"));
                    start.wait();
                    list.iter()
                        .zip(indices)
                        .filter(|(input, index)| {
                            let (verdict, _) = super::run::execute(object, **index, input);
                            input.hook.action(verdict) != super::Action::Pass
                        })
                        .count()
                })
            });
            threads.map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        }))
    }
}
