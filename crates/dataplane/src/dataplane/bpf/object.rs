//! The compiled packet path, as an ELF object within this program.

#[cfg(bpf_object)]
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/traffic-policy-ebpf"));
#[cfg(not(bpf_object))]
static OBJECT: &[u8] = &[];

/// The largest page of a kernel, of arm64.
const PAGE: usize = 65_536;

/// The compiled packet path, as an ELF object; empty in a build without a BPF toolchain.
pub fn object_bytes() -> &'static [u8] {
    OBJECT
}

/// Gives the memory of the object, which is hardly read again once it is loaded, back to the
/// kernel: what is read nevertheless comes from the file of this program, as the first time.
pub fn release() {
    let skipped = OBJECT.as_ptr().align_offset(PAGE);
    let pages = OBJECT.len().saturating_sub(skipped) / PAGE;
    if pages > 0 {
        let start = OBJECT[skipped..].as_ptr().cast_mut();
        // SAFETY: the pages are whole ones of a constant without pointers. Nothing has written to
        // them since they were mapped, so that the file holds the same.
        unsafe { libc::madvise(start.cast(), pages * PAGE, libc::MADV_DONTNEED) };
    }
}

#[cfg(test)]
#[cfg(bpf_object)]
mod tests {
    use std::fs;

    use super::*;

    /// Returns the resident bytes of the mapping that holds the object.
    fn resident() -> usize {
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let own = OBJECT.as_ptr() as usize;
        let holds = |line: &&str| {
            let ends = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
            let ends = ends.map(|(from, to)| [from, to].map(|end| usize::from_str_radix(end, 16)));
            matches!(ends, Some([Ok(from), Ok(to)]) if (from..to).contains(&own))
        };
        let mut lines = smaps.lines().skip_while(|line| !holds(line));
        let kilobytes = lines.find_map(|line| line.strip_prefix("Rss:")?.strip_suffix(" kB")).unwrap();
        kilobytes.trim().parse::<usize>().unwrap() * 1024
    }

    #[test]
    fn released_memory_is_read_again() {
        let before = OBJECT.to_vec();
        // Other tests of this process read the object, too.
        let is_released = (0..100).any(|_| {
            assert!(OBJECT == before);
            let used = resident();
            release();
            used.saturating_sub(resident()) > OBJECT.len() / 10 * 9
        });
        assert!(is_released);
        assert!(OBJECT == before);
    }
}
