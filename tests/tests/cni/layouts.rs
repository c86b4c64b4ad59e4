//! Every layout, with each attach mode that is possible on it.

use std::thread;

use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Cni, Family};
use traffic_policy_testing::matrix;

use crate::table::{self, Row};
use crate::testbed::Testbed;
use crate::{killed, path_mtu, sockets};

/// Tests a layout, and compares the results with the table. `mtus` are those of the path to another
/// node's pods.
fn all_questions(cni: Cni, attach: &'static str, mtus: [u16; 2]) {
    let Some(mut testbed) = Testbed::start(cni, attach) else { return };
    ask_all(&mut testbed, cni, attach, mtus);
}

pub fn ask_all(testbed: &mut Testbed, cni: Cni, attach: &'static str, mtus: [u16; 2]) {
    let matrix = answered_from_outside(&testbed.cluster);
    let sockets = sockets::answered(testbed);
    if mtus == [1300; 2] {
        let node = testbed.cluster.lab.node(2);
        path_mtu::narrow(node, node.pod(1));
    }
    let told = path_mtu::told(testbed);
    the_intended_hook_works(testbed, cni, attach);
    let lost = killed::lost(testbed);
    table::compare(&Row { layout: cni.name(), attach, matrix, sockets, told, lost: lost.clone() });
    // The table could have been written from a failed run.
    assert_eq!((matrix, sockets), (24, 4), "{} {attach}", cni.name());
    assert_eq!(told, mtus.map(Some), "{} {attach}", cni.name());
    assert_eq!(lost, None, "{} {attach}", cni.name());
}

/// Checks that the intended hook did the work: the same answers would come if another one had.
fn the_intended_hook_works(testbed: &Testbed, cni: Cni, attach: &str) {
    let [xdp, tc] = ["xdp", "tc-ingress"].map(|hook| {
        let packets = |outcome| testbed.cluster.agents[0].packets(hook, outcome).unwrap();
        ["forwarded", "replied", "delivered"].map(packets).iter().sum::<u64>()
    });
    match attach {
        "tc" => assert!(xdp == 0 && tc > 0, "{attach}: XDP {xdp}, TC {tc}"),
        // TC finishes packets whose neighbour is not resolved yet.
        "xdp" if !cni.has_tunnels() => assert!(xdp > 4 * tc, "{attach}: XDP {xdp}, TC {tc}"),
        // TC handles packets into a tunnel: XDP sends no frames there.
        _ => assert!(xdp > 0 && tc > 0, "{attach}: XDP {xdp}, TC {tc}"),
    }
}

/// The number of right answers to 24 requests: two policies, three nodes, two families, two
/// protocols.
fn answered_from_outside(cluster: &Cluster) -> usize {
    let of_family = |family| {
        let mut right = 0;
        for number in 1..=3 {
            for protocol in Protocol::BOTH {
                let asked = [
                    matrix::every_pod_answers(cluster, family, number, protocol),
                    matrix::only_local_pods_answer(cluster, family, number, protocol),
                ];
                for error in asked.iter().filter_map(|result| result.as_ref().err()) {
                    println!("{family:?} node-{number}: {error:#}");
                }
                right += asked.iter().filter(|result| result.is_ok()).count();
            }
        }
        right
    };
    // Both run at once: a node that must be silent is observed for 0.8 s, twice for each family.
    thread::scope(|scope| {
        let families = Family::BOTH.map(|family| scope.spawn(move || of_family(family)));
        families.map(|family| family.join().unwrap()).iter().sum()
    })
}

#[test]
fn bridge_tc() {
    all_questions(Cni::Bridge, "tc", [1300; 2]);
}

#[test]
fn bridge_xdp() {
    all_questions(Cni::Bridge, "xdp", [1300; 2]);
}

#[test]
fn flannel_host_gw_tc() {
    all_questions(Cni::FlannelHostGw, "tc", [1300; 2]);
}

#[test]
fn flannel_host_gw_xdp() {
    all_questions(Cni::FlannelHostGw, "xdp", [1300; 2]);
}

/// The veth has checksum offload, as kind leaves it: XDP is tested in `veth_peer`.
#[test]
fn kindnet_tc() {
    all_questions(Cni::Kindnet, "tc", [1300; 2]);
}

#[test]
fn flannel_vxlan_tc() {
    all_questions(Cni::FlannelVxlan, "tc", [1450, 1430]);
}

/// XDP on the wire, TC on the tunnels.
#[test]
fn flannel_vxlan_generic_xdp() {
    all_questions(Cni::FlannelVxlan, "xdp-generic", [1450, 1430]);
}

#[test]
fn calico_vxlan_tc() {
    all_questions(Cni::CalicoVxlan, "tc", [1450, 1430]);
}

#[test]
fn calico_vxlan_generic_xdp() {
    all_questions(Cni::CalicoVxlan, "xdp-generic", [1450, 1430]);
}

#[test]
fn calico_ipip_tc() {
    all_questions(Cni::CalicoIpip, "tc", [1480; 2]);
}

/// XDP on the wire, TC on the tunnel, whose packets have no Ethernet header.
#[test]
fn calico_ipip_xdp() {
    all_questions(Cni::CalicoIpip, "xdp", [1480; 2]);
}

#[test]
fn wireguard_tc() {
    all_questions(Cni::Wireguard, "tc", [1420; 2]);
}

#[test]
fn wireguard_xdp() {
    all_questions(Cni::Wireguard, "xdp", [1420; 2]);
}
