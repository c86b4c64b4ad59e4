//! Sends packets of many flows, run as a live frame (BPF_F_TEST_XDP_LIVE_FRAMES): the packets it
//! transmits leave through the device of its context. Pages come back as the receivers left them,
//! so all headers are written each time.

use aya_ebpf::{
    btf_maps::Array,
    helpers::bpf_ktime_get_ns,
    macros::{btf_map, xdp},
    programs::XdpContext,
};
use traffic_policy_bench_ebpf::{
    FRAME_LENGTH,
    traffic::{BATCH, FIRST_PORT, Generator, PORTS_SHIFT, UDP_SUM},
};
use traffic_policy_ebpf::{
    checksum::{self, word_sum},
    words::{store16, store32, store64},
};

#[btf_map]
pub static GENERATOR: Array<Generator, 1> = Array::new();

const XDP_ABORTED: u32 = 0;
const XDP_DROP: u32 = 1;
const XDP_TX: u32 = 3;

#[xdp(frags)]
pub fn generate(ctx: XdpContext) -> u32 {
    let md = ctx.ctx;
    let (data, end) = unsafe { ((*md).data as usize, (*md).data_end as usize) };
    if data + FRAME_LENGTH > end {
        return XDP_ABORTED;
    }
    let Some(generator) = GENERATOR.get_ptr_mut(0) else { return XDP_ABORTED };
    unsafe {
        let turn = (*generator).turn;
        (*generator).turn = turn + 1;
        if turn == 0 {
            (*generator).started = bpf_ktime_get_ns();
        }
        if turn + 1 == (*generator).turns {
            (*generator).ended = bpf_ktime_get_ns();
        }
        if (*generator).interval != 0 {
            if turn & (BATCH - 1) as u64 == 0 {
                begin_batch(generator);
            }
            if (*generator).burst == 0 {
                return XDP_DROP;
            }
            (*generator).burst -= 1;
        }
        (*generator).sent += 1;
        let flow = (*generator).next;
        (*generator).next = if flow + 1 >= (*generator).count { 0 } else { flow + 1 };
        let client = ((*generator).client + (flow >> PORTS_SHIFT)).to_be();
        let port = (FIRST_PORT + (flow & ((1 << PORTS_SHIFT) - 1)) as u16).to_be();
        let template = (*generator).template;
        store64::<0>(data, template[0]);
        store64::<8>(data, template[1]);
        store64::<16>(data, template[2]);
        store64::<24>(data, template[3]);
        store64::<32>(data, template[4]);
        store64::<40>(data, template[5]);
        store64::<48>(data, template[6]);
        store64::<56>(data, template[7]);
        store64::<64>(data, template[8]);
        store64::<72>(data, template[9]);
        if (*generator).to_clients != 0 {
            store32::<30>(data, client);
            store16::<36>(data, port);
        } else {
            store32::<26>(data, client);
            store16::<34>(data, port);
        }
        store16::<24>(data, !checksum::fold((*generator).ip_sum + word_sum(client)));
        let sum = !checksum::fold((*generator).l4_sum + word_sum(client) + port as u64);
        if (*generator).sum_at == UDP_SUM {
            store16::<40>(data, sum);
        } else {
            store16::<50>(data, sum);
        }
    }
    XDP_TX
}

/// Adds the time of the last burst, and begins a new one if it is due.
#[inline(always)]
unsafe fn begin_batch(generator: *mut Generator) {
    unsafe {
        let now = bpf_ktime_get_ns();
        if (*generator).since != 0 {
            (*generator).busy += now - (*generator).since;
            (*generator).since = 0;
        }
        if now >= (*generator).due {
            // Packets that were not sent in time are not sent later.
            (*generator).due = now.max((*generator).due + (*generator).interval);
            (*generator).burst = (*generator).burst_length;
            (*generator).since = now;
        }
    }
}
