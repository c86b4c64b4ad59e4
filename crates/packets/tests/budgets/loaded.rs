//! Figures of the loaded programs and maps, as the running kernel reports them.

use std::fs;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::OnceLock;

use aya::programs::{Program, ProgramError, ProgramInfo};
use traffic_policy_dataplane::{self as dataplane, Kernel, MapSizes};
use traffic_policy_testing::harness::descriptor;

use crate::recorded::Figures;

/// The instructions verified and bytes translated of each program, and the bytes of each map.
pub fn figures() -> &'static Figures {
    static FIGURES: OnceLock<Figures> = OnceLock::new();
    FIGURES.get_or_init(measure)
}

fn measure() -> Figures {
    // Reports missing privileges in a sentence.
    dataplane::check_privileges().unwrap_or_else(|error| panic!("budgets: {error:#}"));
    let kernel = Kernel::running().unwrap();
    let mut object = dataplane::load(MapSizes::default(), None, &kernel)
        .unwrap_or_else(|error| panic!("budgets: {error:#}"));
    dataplane::load_programs(&mut object).unwrap();
    let mut figures = Figures::new();
    for (name, program) in object.programs() {
        let info: ProgramInfo = match program.info() {
            // A kernel may refuse all iterators: `load_programs` has looked at the error.
            Err(ProgramError::NotLoaded) if matches!(program, Program::Iter(_)) => continue,
            info => info.unwrap(),
        };
        let verified = info.verified_instruction_count().expect("known since Linux 5.16");
        figures.insert(format!("verified {name}"), verified.into());
        figures.insert(format!("bytes {name}"), info.size_translated().unwrap_or_default().into());
    }
    let mut all = 0;
    for (name, map) in object.maps() {
        if name.starts_with('.') {
            continue;
        }
        let bytes = memory(descriptor(map).unwrap());
        all += bytes;
        figures.insert(format!("memory {name}"), bytes);
    }
    figures.insert("memory of all maps".to_owned(), all);
    figures
}

/// The memory that the kernel charges for a map, in bytes.
fn memory(map: BorrowedFd<'_>) -> u64 {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", map.as_raw_fd())).unwrap();
    let memlock = info.lines().find_map(|line| line.strip_prefix("memlock:"));
    memlock.expect("fdinfo of a map names its memory").trim().parse().unwrap()
}
