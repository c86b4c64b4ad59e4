//! The programs: `xdp_ingress`, `tc_ingress` and `tc_egress` for packets, with those that they jump to, `sweep` for old flows;
//! `socket_…` for calls of sockets.

mod answer;
mod carried;
mod choose;
mod claim;
mod context;
mod count;
mod create;
mod egress;
mod error;
mod established;
mod event;
mod exit;
mod extension;
mod family;
mod flows;
mod fragment;
mod hop;
mod ingress;
mod irregular;
mod maps;
mod pair;
mod parse;
mod question;
mod rewrite;
mod socket;
mod sweep;
mod trace;
mod wire;

use aya_ebpf::{
    bindings::{__sk_buff, xdp_md},
    cty::c_void,
    macros::{cgroup_sock, cgroup_sock_addr, classifier, raw_tracepoint, xdp},
    programs::{RawTracePointContext, SockAddrContext, SockContext, TcContext, XdpContext},
};
use context::{Tc, Xdp};
use family::{V4, V6};
use sweep::Element;
use traffic_policy_ebpf::abi::{Address4, Address6, Flow, FlowKey, Socket, SocketKey, hook};

fn md(ctx: &XdpContext) -> Xdp {
    let md = ctx.ctx as *mut xdp_md;
    Xdp { md, ingress: unsafe { (*md).ingress_ifindex } }
}

fn skb(ctx: &TcContext) -> Tc {
    Tc { skb: ctx.skb.skb as *mut __sk_buff }
}

fn call(ctx: &SockAddrContext) -> socket::Call {
    socket::Call { context: ctx.sock_addr }
}

#[xdp]
pub fn xdp_ingress(ctx: XdpContext) -> u32 {
    established::run(md(&ctx)) as u32
}

#[xdp]
pub fn xdp_attend4(ctx: XdpContext) -> u32 {
    ingress::attend::<Xdp, V4>(md(&ctx)) as u32
}

#[xdp]
pub fn xdp_attend6(ctx: XdpContext) -> u32 {
    ingress::attend::<Xdp, V6>(md(&ctx)) as u32
}

#[xdp]
pub fn xdp_answer4(ctx: XdpContext) -> u32 {
    answer::run::<Xdp, V4>(md(&ctx)) as u32
}

#[xdp]
pub fn xdp_answer6(ctx: XdpContext) -> u32 {
    answer::run::<Xdp, V6>(md(&ctx)) as u32
}

#[classifier]
pub fn tc_ingress(ctx: TcContext) -> i32 {
    let packet = skb(&ctx);
    packet.pull();
    established::run(packet)
}

#[classifier]
#[inline(always)]
pub fn tc_attend4(ctx: TcContext) -> i32 {
    ingress::attend::<Tc, V4>(skb(&ctx))
}

#[classifier]
#[inline(always)]
pub fn tc_attend6(ctx: TcContext) -> i32 {
    ingress::attend::<Tc, V6>(skb(&ctx))
}

#[classifier]
pub fn tc_answer4(ctx: TcContext) -> i32 {
    answer::run::<Tc, V4>(skb(&ctx))
}

#[classifier]
pub fn tc_answer6(ctx: TcContext) -> i32 {
    answer::run::<Tc, V6>(skb(&ctx))
}

#[classifier]
pub fn tc_egress(ctx: TcContext) -> i32 {
    let packet = skb(&ctx);
    packet.pull();
    exit::leave(packet, hook::EGRESS, egress::run(packet))
}

/// Run by `explain` through BPF_PROG_TEST_RUN, never attached: the kernel test-runs no program of sockets.
#[xdp]
pub fn explain_socket(_: XdpContext) -> u32 {
    question::run();
    0
}

#[xdp]
pub fn xdp_error4(ctx: XdpContext) -> u32 {
    error::run::<Xdp, V4>(md(&ctx)) as u32
}

#[xdp]
pub fn xdp_error6(ctx: XdpContext) -> u32 {
    error::run::<Xdp, V6>(md(&ctx)) as u32
}

#[classifier]
pub fn tc_error4(ctx: TcContext) -> i32 {
    error::run::<Tc, V4>(skb(&ctx))
}

#[classifier]
pub fn tc_error6(ctx: TcContext) -> i32 {
    error::run::<Tc, V6>(skb(&ctx))
}

#[classifier]
pub fn tc_error_out4(ctx: TcContext) -> i32 {
    let packet = skb(&ctx);
    exit::leave(packet, hook::EGRESS, error::outgoing::<Tc, V4>(packet).into())
}

#[classifier]
pub fn tc_error_out6(ctx: TcContext) -> i32 {
    let packet = skb(&ctx);
    exit::leave(packet, hook::EGRESS, error::outgoing::<Tc, V6>(packet).into())
}

#[xdp]
#[inline(always)]
pub fn xdp_irregular4(ctx: XdpContext) -> u32 {
    irregular::run::<Xdp, V4>(md(&ctx)) as u32
}

#[xdp]
#[inline(always)]
pub fn xdp_irregular6(ctx: XdpContext) -> u32 {
    irregular::run::<Xdp, V6>(md(&ctx)) as u32
}

#[classifier]
#[inline(always)]
pub fn tc_irregular4(ctx: TcContext) -> i32 {
    irregular::run::<Tc, V4>(skb(&ctx))
}

#[classifier]
#[inline(always)]
pub fn tc_irregular6(ctx: TcContext) -> i32 {
    irregular::run::<Tc, V6>(skb(&ctx))
}

#[classifier]
pub fn tc_irregular_out4(ctx: TcContext) -> i32 {
    let packet = skb(&ctx);
    exit::leave(packet, hook::EGRESS, irregular::outgoing::<Tc, V4>(packet).into())
}

#[classifier]
pub fn tc_irregular_out6(ctx: TcContext) -> i32 {
    let packet = skb(&ctx);
    exit::leave(packet, hook::EGRESS, irregular::outgoing::<Tc, V6>(packet).into())
}

/// Run by the agent through BPF_PROG_TEST_RUN, never attached.
#[raw_tracepoint(tracepoint = "sys_enter")]
pub fn sweep(_: RawTracePointContext) -> i32 {
    sweep::begin();
    0
}

/// Iterators over tables, which [`sweep`] begins; read by the agent a piece at a time. aya has no macro for them.
macro_rules! walks {
    ($($name:ident: $key:ty => $value:ty, $look:expr;)+) => {
        $(
            #[unsafe(no_mangle)]
            #[unsafe(link_section = "iter/bpf_map_elem")]
            pub fn $name(element: *const Element<$key, $value>) -> i32 {
                sweep::visit(element, $look)
            }
        )+
    };
}

walks! {
    sweep_flows4: FlowKey<Address4> => Flow<Address4>, sweep::half::<V4>;
    sweep_flows6: FlowKey<Address6> => Flow<Address6>, sweep::half::<V6>;
    sweep_pending4: FlowKey<Address4> => Flow<Address4>, sweep::unconfirmed::<V4>;
    sweep_pending6: FlowKey<Address6> => Flow<Address6>, sweep::unconfirmed::<V6>;
    sweep_sockets: SocketKey => Socket, sweep::conversation;
}

/// Tells the time in jiffies; run by the agent as [`sweep`] is. Without the macro, which answers 0 whatever the function
/// says.
#[unsafe(no_mangle)]
#[unsafe(link_section = "raw_tp/sys_enter")]
pub fn clock(_: *mut c_void) -> u32 {
    hop::now()
}

#[cgroup_sock_addr(connect4)]
pub fn socket_connect4(ctx: SockAddrContext) -> i32 {
    socket::connect4(call(&ctx))
}

#[cgroup_sock_addr(connect6)]
pub fn socket_connect6(ctx: SockAddrContext) -> i32 {
    socket::connect6(call(&ctx))
}

#[cgroup_sock_addr(sendmsg4)]
pub fn socket_sendmsg4(ctx: SockAddrContext) -> i32 {
    socket::sendmsg4(call(&ctx))
}

#[cgroup_sock_addr(sendmsg6)]
pub fn socket_sendmsg6(ctx: SockAddrContext) -> i32 {
    socket::sendmsg6(call(&ctx))
}

#[cgroup_sock_addr(recvmsg4)]
pub fn socket_recvmsg4(ctx: SockAddrContext) -> i32 {
    socket::recvmsg4(call(&ctx))
}

#[cgroup_sock_addr(recvmsg6)]
pub fn socket_recvmsg6(ctx: SockAddrContext) -> i32 {
    socket::recvmsg6(call(&ctx))
}

#[cgroup_sock_addr(getpeername4)]
pub fn socket_getpeername4(ctx: SockAddrContext) -> i32 {
    socket::getpeername4(call(&ctx))
}

#[cgroup_sock_addr(getpeername6)]
pub fn socket_getpeername6(ctx: SockAddrContext) -> i32 {
    socket::getpeername6(call(&ctx))
}

#[cgroup_sock(sock_release)]
pub fn socket_release(ctx: SockContext) -> i32 {
    socket::release(socket::Closing { context: ctx.sock })
}
