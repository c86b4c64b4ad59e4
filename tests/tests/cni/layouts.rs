//! Every layout, with each attach mode that is possible on it.

use std::thread;

use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Cni, Family};
use traffic_policy_testing::matrix;
use traffic_policy_testing::rows;

use crate::table::{self, Row};
use crate::testbed::Testbed;
use crate::{killed, path_mtu, policies, sockets};

/// The modes of `--local-delivery`.
pub const STACK: &str = "stack";
const DIRECT: &str = "direct";

/// Tests a layout with these values of `--attach` and `--local-delivery`, and compares the results
/// with the table. `mtus` are those of the path to another node's pods.
fn all_questions(cni: Cni, modes: [&'static str; 2], mtus: [u16; 2]) {
    let Some(mut testbed) = Testbed::start(cni, modes[0], modes[1]) else { return };
    ask_all(&mut testbed, cni, modes, mtus);
}

pub fn ask_all(testbed: &mut Testbed, cni: Cni, modes: [&'static str; 2], mtus: [u16; 2]) {
    let [attach, delivery] = modes;
    let matrix = answered_from_outside(&testbed.cluster);
    let sockets = sockets::answered(testbed);
    if mtus == [1300; 2] {
        let node = testbed.cluster.lab.node(2);
        path_mtu::narrow(node, node.pod(1));
    }
    let told = path_mtu::told(testbed);
    the_intended_hook_works(testbed, cni, attach);
    let policies = policies::right(testbed);
    the_intended_way_is_taken(testbed, delivery);
    let lost = killed::lost(testbed);
    let what = format!("{} {attach} {delivery}", cni.name());
    table::compare(&Row {
        layout: cni.name(),
        attach,
        delivery,
        matrix,
        sockets,
        told,
        lost: lost.clone(),
        policies,
    });
    // The table could have been written from a failed run.
    assert_eq!((matrix, sockets, policies), (24, 4, [policies::ALL; 2]), "{what}");
    assert_eq!(told, mtus.map(Some), "{what}");
    assert_eq!(lost, None, "{what}");
}

/// Checks that established packets, and with [`DIRECT`] only, have bypassed the stack.
fn the_intended_way_is_taken(testbed: &Testbed, delivery: &str) {
    let packets = |outcome| testbed.cluster.agents[0].packets("tc-ingress", outcome).unwrap();
    let direct = ["delivered-direct", "replied-direct"].map(packets);
    if delivery == DIRECT {
        // Two families, two protocols, both ways to write rules.
        let requests = 8 * policies::REQUESTS as u64;
        let most = |packets: &u64| *packets > requests * 9 / 10;
        assert!(direct.iter().all(most), "{direct:?} of more than {requests}");
    } else {
        assert_eq!(direct, [0, 0]);
    }
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

rows! {
    fn bridge_tc() = all_questions(Cni::Bridge, ["tc", STACK], [1300; 2]);
    fn bridge_xdp() = all_questions(Cni::Bridge, ["xdp", STACK], [1300; 2]);
    fn flannel_host_gw_tc() = all_questions(Cni::FlannelHostGw, ["tc", STACK], [1300; 2]);
    fn flannel_host_gw_xdp() = all_questions(Cni::FlannelHostGw, ["xdp", STACK], [1300; 2]);
    /// The veth has checksum offload, as kind leaves it: XDP is tested in `veth_peer`.
    fn kindnet_tc() = all_questions(Cni::Kindnet, ["tc", STACK], [1300; 2]);
    fn flannel_vxlan_tc() = all_questions(Cni::FlannelVxlan, ["tc", STACK], [1450, 1430]);
    /// XDP on the wire, TC on the tunnels.
    fn flannel_vxlan_generic_xdp() = all_questions(Cni::FlannelVxlan, ["xdp-generic", STACK], [1450, 1430]);
    fn calico_vxlan_tc() = all_questions(Cni::CalicoVxlan, ["tc", STACK], [1450, 1430]);
    fn calico_vxlan_generic_xdp() = all_questions(Cni::CalicoVxlan, ["xdp-generic", STACK], [1450, 1430]);
    fn calico_ipip_tc() = all_questions(Cni::CalicoIpip, ["tc", STACK], [1480; 2]);
    /// XDP on the wire, TC on the tunnel, whose packets have no Ethernet header.
    fn calico_ipip_xdp() = all_questions(Cni::CalicoIpip, ["xdp", STACK], [1480; 2]);
    fn wireguard_tc() = all_questions(Cni::Wireguard, ["tc", STACK], [1420; 2]);
    fn wireguard_xdp() = all_questions(Cni::Wireguard, ["xdp", STACK], [1420; 2]);
    fn bridge_direct() = all_questions(Cni::Bridge, ["tc", DIRECT], [1300; 2]);
    fn flannel_host_gw_direct() = all_questions(Cni::FlannelHostGw, ["tc", DIRECT], [1300; 2]);
    /// XDP leaves established packets to pods of the node to TC.
    fn flannel_host_gw_xdp_direct() = all_questions(Cni::FlannelHostGw, ["xdp", DIRECT], [1300; 2]);
    fn kindnet_direct() = all_questions(Cni::Kindnet, ["tc", DIRECT], [1300; 2]);
    fn flannel_vxlan_direct() = all_questions(Cni::FlannelVxlan, ["tc", DIRECT], [1450, 1430]);
    fn calico_vxlan_direct() = all_questions(Cni::CalicoVxlan, ["tc", DIRECT], [1450, 1430]);
    fn aws_secondary_eni_direct() = all_questions(Cni::AwsSecondaryEni, ["tc", DIRECT], [1300; 2]);
    fn calico_ipip_direct() = all_questions(Cni::CalicoIpip, ["tc", DIRECT], [1480; 2]);
    fn wireguard_direct() = all_questions(Cni::Wireguard, ["tc", DIRECT], [1420; 2]);
}
