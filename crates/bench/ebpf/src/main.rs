//! Programs for `cargo xtask bench`, for the BPF target only; they are no part of the agent.
//!
//! BPF_PROG_TEST_RUN gives a program the same buffer again and again, as the program left it. So
//! `feed` writes the next packet into it and jumps to the measured program; the time of `feed` with
//! an empty program is subtracted.
//!
//! The *floors* are the minimum work of any program of this kind. `mac_swap`: send the frame back.
//! `floor_established`: parse, find the flow in one preallocated hash, translate with checksums,
//! set the MAC addresses; no time-outs, no TCP states, no MTU, no counters, IPv4 without options
//! only. `floor_new`: find the Service and an endpoint, insert both entries; `floor_new_fib` also
//! queries the FIB for the route of each flow. Those of direct forwarding (`outer`) put a packet
//! into an outer one, open it, and translate its answer.
#![cfg_attr(target_arch = "bpf", no_std, no_main)]
#![cfg_attr(
    target_arch = "bpf",
    expect(clippy::needless_pass_by_value, reason = "aya's macros hand a context over by value"),
    expect(
        clippy::undocumented_unsafe_blocks,
        reason = "packet words, map values and contexts, for which the verifier stands: see datapath.rs"
    )
)]

#[cfg(target_arch = "bpf")]
#[expect(unreachable_pub, reason = "a program has no API; pub says what its modules share")]
mod floor;
#[cfg(target_arch = "bpf")]
#[expect(unreachable_pub, reason = "a program has no API; pub says what its modules share")]
mod generator;
#[cfg(target_arch = "bpf")]
#[expect(unreachable_pub, reason = "a program has no API; pub says what its modules share")]
mod outer;
#[cfg(target_arch = "bpf")]
#[expect(unreachable_pub, reason = "a program has no API; pub says what its modules share")]
mod sink;

#[cfg(not(target_arch = "bpf"))]
fn main() {}

#[cfg(target_arch = "bpf")]
#[expect(unreachable_pub, reason = "a program has no API; pub says what its modules share")]
mod feed {
    use aya_ebpf::{
        btf_maps::{Array, ProgramArray},
        cty::c_void,
        helpers::{bpf_skb_change_tail, bpf_tail_call, bpf_xdp_adjust_head, bpf_xdp_adjust_tail},
        macros::{btf_map, classifier, xdp},
        programs::{TcContext, XdpContext},
    };
    use traffic_policy_bench_ebpf::{FRAME_LENGTH, FRAME_WORDS, FRAMES as FRAME_COUNT, Feed};
    use traffic_policy_ebpf::{barrier::opaque, words::store64};

    /// BPF_F_MMAPABLE: a million frames are written by plain stores.
    const MMAPABLE: usize = 1024;

    /// The packets, in the order in which they are sent.
    #[btf_map]
    pub static FRAMES: Array<[u64; FRAME_WORDS], { FRAME_COUNT as usize }, MMAPABLE> = Array::new();
    #[btf_map]
    pub static FEED: Array<Feed, 1> = Array::new();
    /// The measured program.
    #[btf_map]
    pub static XDP_SUBJECT: ProgramArray<1> = ProgramArray::new();
    #[btf_map]
    pub static TC_SUBJECT: ProgramArray<1> = ProgramArray::new();

    const XDP_PASS: u32 = 2;
    const XDP_ABORTED: u32 = 0;
    const TC_OK: i32 = 0;
    const TC_SHOT: i32 = 2;

    /// Writes the next packet.
    #[inline(always)]
    fn next(data: usize, end: usize) {
        if data + FRAME_LENGTH > end {
            return;
        }
        let Some(feed) = FEED.get_ptr_mut(0) else { return };
        let index = unsafe { (*feed).next };
        let Some(frame) = FRAMES.get_ptr(index) else { return };
        unsafe {
            (*feed).next = if index + 1 >= (*feed).end { (*feed).first } else { index + 1 };
            let frame = *frame;
            store64::<0>(data, frame[0]);
            store64::<8>(data, frame[1]);
            store64::<16>(data, frame[2]);
            store64::<24>(data, frame[3]);
            store64::<32>(data, frame[4]);
            store64::<40>(data, frame[5]);
            store64::<48>(data, frame[6]);
            store64::<56>(data, frame[7]);
            store64::<64>(data, frame[8]);
            store64::<72>(data, frame[9]);
        }
    }

    #[xdp(frags)]
    pub fn feed_xdp(ctx: XdpContext) -> u32 {
        let md = ctx.ctx;
        unsafe {
            next((*md).data as usize, (*md).data_end as usize);
            bpf_tail_call(md.cast(), (&raw const XDP_SUBJECT).cast_mut().cast::<c_void>(), 0);
        }
        XDP_ABORTED
    }

    #[classifier]
    pub fn feed_tc(ctx: TcContext) -> i32 {
        let skb = ctx.skb.skb;
        unsafe {
            next((*skb).data as usize, (*skb).data_end as usize);
            bpf_tail_call(skb.cast(), (&raw const TC_SUBJECT).cast_mut().cast::<c_void>(), 0);
        }
        TC_SHOT
    }

    /// Does the same as `feed_xdp`, for programs that leave a packet of another length: restores
    /// the length of a frame, even where nothing has changed it, so that this costs every program
    /// the same.
    #[xdp(frags)]
    pub fn feed_resized_xdp(ctx: XdpContext) -> u32 {
        let md = ctx.ctx;
        unsafe {
            let length = opaque((*md).data_end as u64 - (*md).data as u64) as i32;
            if bpf_xdp_adjust_tail(md, FRAME_LENGTH as i32 - length) != 0 {
                return XDP_ABORTED;
            }
            next((*md).data as usize, (*md).data_end as usize);
            bpf_tail_call(md.cast(), (&raw const XDP_SUBJECT).cast_mut().cast::<c_void>(), 0);
        }
        XDP_ABORTED
    }

    /// Does the same as `feed_resized_xdp` for programs that put headers in front of a packet.
    #[xdp(frags)]
    pub fn feed_grown_xdp(ctx: XdpContext) -> u32 {
        let md = ctx.ctx;
        unsafe {
            let length = opaque((*md).data_end as u64 - (*md).data as u64) as i32;
            if bpf_xdp_adjust_head(md, length - FRAME_LENGTH as i32) != 0 {
                return XDP_ABORTED;
            }
            next((*md).data as usize, (*md).data_end as usize);
            bpf_tail_call(md.cast(), (&raw const XDP_SUBJECT).cast_mut().cast::<c_void>(), 0);
        }
        XDP_ABORTED
    }

    /// The TC counterpart of `feed_resized_xdp`.
    #[classifier]
    pub fn feed_resized_tc(ctx: TcContext) -> i32 {
        let skb = ctx.skb.skb;
        unsafe {
            if bpf_skb_change_tail(skb, FRAME_LENGTH as u32, 0) != 0 {
                return TC_SHOT;
            }
            next((*skb).data as usize, (*skb).data_end as usize);
            bpf_tail_call(skb.cast(), (&raw const TC_SUBJECT).cast_mut().cast::<c_void>(), 0);
        }
        TC_SHOT
    }

    #[xdp(frags)]
    pub fn empty_xdp(_: XdpContext) -> u32 {
        XDP_PASS
    }

    #[classifier]
    pub fn empty_tc(_: TcContext) -> i32 {
        TC_OK
    }
}

#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // The verifier proves that this is never reached.
    loop {}
}

#[cfg(target_arch = "bpf")]
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
