//! Every program, with the function that implements it. The crate is for the BPF target only: on
//! the host this is an empty program, so that the workspace builds as a whole.
//!
//! The path of a packet from program to program is drawn in [`datapath`].
#![cfg_attr(target_arch = "bpf", no_std, no_main, feature(asm_experimental_arch))]

#[cfg(target_arch = "bpf")]
mod datapath;

#[cfg(not(target_arch = "bpf"))]
fn main() {}

/// Defines programs of one kind: `name => function`, with the function's argument made from the
/// kernel's context.
///
/// With `each`, every program has a section of its own: for each program, aya copies the source
/// lines of its whole section. XDP programs have one section: behind `xdp.frags/` aya accepts
/// `cpumap` and `devmap` alone.
#[cfg(target_arch = "bpf")]
macro_rules! programs {
    (
        each $section:literal, $parameter:ident: *mut $context:ty => $argument:expr, $verdict:ty;
        $($name:ident => $run:path;)+
    ) => {
        $(programs! {
            concat!($section, "/", stringify!($name)), $parameter: *mut $context => $argument, $verdict;
            $name => $run;
        })+
    };
    (
        $section:expr, $parameter:ident: *mut $context:ty => $argument:expr, $verdict:ty;
        $($(#[$attribute:meta])* $name:ident => $run:path;)+
    ) => {
        $(
            $(#[$attribute])*
            #[unsafe(no_mangle)]
            #[unsafe(link_section = $section)]
            pub fn $name($parameter: *mut $context) -> $verdict {
                $run($argument) as $verdict
            }
        )+
    };
}

/// Defines programs of a cgroup, for calls of its sockets: `section, name => function`.
///
/// The inner function is optimised before it is inlined, which saves 32 instructions in `connect4`.
#[cfg(target_arch = "bpf")]
macro_rules! socket_programs {
    ($context:ty => $call:ident: $($section:literal, $name:ident => $run:path;)+) => {
        $(
            #[unsafe(no_mangle)]
            #[unsafe(link_section = $section)]
            pub fn $name(context: *mut $context) -> i32 {
                return $name(context);
                fn $name(context: *mut $context) -> i32 {
                    $run($call::new(context))
                }
            }
        )+
    };
}

/// Defines programs that the kernel calls for each element of a map (`bpf_map_elem` iterators):
/// `name: key => value, function`.
#[cfg(target_arch = "bpf")]
macro_rules! iterators {
    ($($name:ident: $key:ty => $value:ty, $visit:path;)+) => {
        $(
            #[unsafe(no_mangle)]
            #[unsafe(link_section = "iter/bpf_map_elem")]
            pub fn $name(element: *const Element<$key, $value>) -> i32 {
                gc::visit(element, $visit)
            }
        )+
    };
}

#[cfg(target_arch = "bpf")]
mod programs {
    use aya_ebpf::{
        bindings::{__sk_buff, bpf_sock, bpf_sock_addr, bpf_sock_ops, xdp_md},
        cty::c_void,
    };
    use traffic_policy_ebpf::abi::{Address4, Address6, Flow, FlowKey, SocketKey, TranslatedSocket};

    use crate::datapath::{
        clock,
        ctx::{
            tc::{Tc, TcL3, TcPod},
            xdp::Xdp,
        },
        egress,
        family::{V4, V6},
        fast_path,
        flow::gc::{self, Element},
        icmp_errors, l3_ingress, no_sctp, open, open_reply, pod, priority_tag, reject, slow_path,
        sock::{
            self,
            addr::{Call, Closing},
            explain,
            ops::{self, Callback},
        },
        split, variable_headers,
    };

    programs! {
        "xdp.frags", context: *mut xdp_md => <Xdp>::new(context), u32;
        tp_xdp_ingress => fast_path::run;
        tp_xdp_slow4 => slow_path::run::<Xdp, V4>;
        tp_xdp_slow6 => slow_path::run::<Xdp, V6>;
        tp_xdp_icmp4 => icmp_errors::run::<Xdp, V4>;
        tp_xdp_icmp6 => icmp_errors::run::<Xdp, V6>;
        tp_xdp_vhdr4 => variable_headers::run::<Xdp, V4>;
        tp_xdp_vhdr6 => variable_headers::run::<Xdp, V6>;
        tp_xdp_reject4 => reject::run::<Xdp, V4>;
        tp_xdp_reject6 => reject::run::<Xdp, V6>;
        tp_xdp_openbk4 => open_reply::run::<Xdp, V4>;
        tp_xdp_openbk6 => open_reply::run::<Xdp, V6>;
        // Run by `explain` through BPF_PROG_TEST_RUN, never attached: the kernel test-runs no
        // socket programs.
        tp_explain_sock => explain::run;
    }

    programs! {
        each "classifier", context: *mut __sk_buff => <Tc>::new(context), i32;
        tp_tc_ingress => fast_path::run;
        tp_tc_slow4 => slow_path::run::<Tc, V4>;
        tp_tc_slow6 => slow_path::run::<Tc, V6>;
        tp_tc_icmp4 => icmp_errors::run::<Tc, V4>;
        tp_tc_icmp6 => icmp_errors::run::<Tc, V6>;
        tp_tc_vhdr4 => variable_headers::run::<Tc, V4>;
        tp_tc_vhdr6 => variable_headers::run::<Tc, V6>;
        tp_tc_reject4 => reject::run::<Tc, V4>;
        tp_tc_reject6 => reject::run::<Tc, V6>;
        tp_tc_egress => egress::run;
        tp_tc_pod => pod::run;
        tp_tc_icmp_out4 => icmp_errors::run_out::<Tc, V4>;
        tp_tc_icmp_out6 => icmp_errors::run_out::<Tc, V6>;
        tp_tc_vhdr_out4 => variable_headers::run_out::<Tc, V4>;
        tp_tc_vhdr_out6 => variable_headers::run_out::<Tc, V6>;
        tp_tc_priority => priority_tag::run;
        tp_tc_split4 => split::run::<false>;
        tp_tc_open4 => open::run::<V4>;
        tp_tc_open6 => open::run::<V6>;
        tp_tc_openback4 => open_reply::run::<Tc, V4>;
        tp_tc_openback6 => open_reply::run::<Tc, V6>;
    }

    // Programs on the host side of pods' devices, which share the others' programs for what creates
    // no flow.
    programs! {
        each "classifier", context: *mut __sk_buff => <TcPod>::new(context), i32;
        tp_pod_ingress => fast_path::run;
        tp_pod_egress => egress::run;
        tp_pod_slow4 => slow_path::run::<TcPod, V4>;
        tp_pod_slow6 => slow_path::run::<TcPod, V6>;
        tp_pod_vhdr4 => variable_headers::run::<TcPod, V4>;
        tp_pod_vhdr6 => variable_headers::run::<TcPod, V6>;
    }

    // Programs on devices without Ethernet, whose packets begin with the IP header.
    programs! {
        each "classifier", context: *mut __sk_buff => <TcL3>::new(context), i32;
        tp_l3_ingress => l3_ingress::run;
        tp_l3_egress => egress::run;
        tp_l3_icmp_out4 => icmp_errors::run_out::<TcL3, V4>;
        tp_l3_icmp_out6 => icmp_errors::run_out::<TcL3, V6>;
        tp_l3_vhdr_out4 => variable_headers::run_out::<TcL3, V4>;
        tp_l3_vhdr_out6 => variable_headers::run_out::<TcL3, V6>;
    }

    // Programs for SCTP, separate so that other packets bear no cost for it.
    programs! {
        "xdp.frags", context: *mut xdp_md => Xdp::<true>::new(context), u32;
        tp_xdp_sctp4 => variable_headers::run::<Xdp<true>, V4>;
        tp_xdp_sctp6 => variable_headers::run::<Xdp<true>, V6>;
        tp_xdp_nosctp4 => no_sctp::run::<Xdp<true>, V4>;
        tp_xdp_nosctp6 => no_sctp::run::<Xdp<true>, V6>;
    }

    programs! {
        each "classifier", context: *mut __sk_buff => Tc::<true>::new(context), i32;
        tp_tc_sctp4 => variable_headers::run::<Tc<true>, V4>;
        tp_tc_sctp6 => variable_headers::run::<Tc<true>, V6>;
        tp_tc_nosctp4 => no_sctp::run::<Tc<true>, V4>;
        tp_tc_nosctp6 => no_sctp::run::<Tc<true>, V6>;
        tp_tc_sctp_out4 => variable_headers::run_out::<Tc<true>, V4>;
        tp_tc_sctp_out6 => variable_headers::run_out::<Tc<true>, V6>;
        tp_tc_sctp_cut4 => split::run::<true>;
    }

    programs! {
        each "classifier", context: *mut __sk_buff => TcPod::<true>::new(context), i32;
        tp_pod_sctp4 => variable_headers::run::<TcPod<true>, V4>;
        tp_pod_sctp6 => variable_headers::run::<TcPod<true>, V6>;
    }

    programs! {
        each "classifier", context: *mut __sk_buff => TcL3::<true>::new(context), i32;
        tp_l3_sctp_out4 => variable_headers::run_out::<TcL3<true>, V4>;
        tp_l3_sctp_out6 => variable_headers::run_out::<TcL3<true>, V6>;
    }

    socket_programs! {
        bpf_sock_addr => Call:
        "cgroup/connect4", tp_connect4 => sock::connect4;
        "cgroup/connect6", tp_connect6 => sock::connect6;
        "cgroup/sendmsg4", tp_sendmsg4 => sock::sendmsg4;
        "cgroup/sendmsg6", tp_sendmsg6 => sock::sendmsg6;
        "cgroup/recvmsg4", tp_recvmsg4 => sock::recvmsg4;
        "cgroup/recvmsg6", tp_recvmsg6 => sock::recvmsg6;
        "cgroup/getpeername4", tp_getpeer4 => sock::getpeername4;
        "cgroup/getpeername6", tp_getpeer6 => sock::getpeername6;
    }

    socket_programs! {
        bpf_sock => Closing:
        "cgroup/sock_release", tp_sk_release => sock::release;
    }

    socket_programs! {
        bpf_sock_ops => Callback:
        "sockops", tp_sock_ops => ops::run;
    }

    // Run by the agent through BPF_PROG_TEST_RUN, never attached: the start of a sweep, its look at
    // one entry where the kernel refuses iterators, and the time in jiffies.
    programs! {
        "raw_tp/sys_enter", context: *mut c_void => context, u32;
        tp_gc_begin => gc::begin;
        tp_gc_flow4 => gc::one_flow::<V4>;
        tp_gc_flow6 => gc::one_flow::<V6>;
        tp_gc_socket => gc::one_socket;
        tp_clock => clock::run;
    }

    // Walks over the tables of flows and sockets, which `tp_gc_begin` begins; the agent reads them
    // piece by piece.
    iterators! {
        tp_gc_flows4: FlowKey<Address4> => Flow<Address4>, gc::flow_entry::<V4>;
        tp_gc_flows6: FlowKey<Address6> => Flow<Address6>, gc::flow_entry::<V6>;
        tp_gc_sockets: SocketKey => TranslatedSocket, gc::socket_entry;
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
