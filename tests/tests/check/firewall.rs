//! Firewall rules that are in the way.

use traffic_policy_agent::check::forward_policy_drop;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::Lab;
use traffic_policy_testing::nftables::{Chain, Family};
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::traffic::Outcome;

use crate::output::{check, one_node};

#[test]
fn a_forward_policy_of_drop() {
    let lab = one_node(Lab::builder());
    let node = lab.node(1).netns();
    let chain = |family, table, name, forward| Chain { family, table, name, forward };
    // The chains that kubelet and an accepting firewall leave.
    node.nft_chain(&chain(Family::Ip, "nat", "KUBE-MARK-MASQ", None)).unwrap();
    node.nft_chain(&chain(Family::Inet, "fire", "fwd", Some(false))).unwrap();
    check(&lab, &[]).is_well();
    assert_eq!(node.run(forward_policy_drop), []);

    node.nft_chain(&chain(Family::Ip, "filter", "FORWARD", Some(true))).unwrap();
    let checked = check(&lab, &[]);
    checked.only(
        "warning",
        "forward-policy",
        "chain FORWARD of nftables table ip filter has policy DROP",
        "iptables -I FORWARD -d",
    );
    let [finding] = node.run(forward_policy_drop).try_into().unwrap();
    assert_eq!(serde_json::to_value(finding).unwrap(), *checked.complaints()[0]);
    // The chains that Docker leaves.
    node.nft_chain(&chain(Family::Ip, "filter", "DOCKER-USER", None)).unwrap();
    check(&lab, &[]).only("warning", "forward-policy", "FORWARD", "iptables -I DOCKER-USER -s");
    node.delete_nft_table(Family::Ip, "filter").unwrap();
    check(&lab, &[]).is_well();

    node.nft_chain(&chain(Family::Inet, "fire", "strict", Some(true))).unwrap();
    check(&lab, &[]).only(
        "warning",
        "forward-policy",
        "table inet fire",
        "nft insert rule inet fire strict ip6 saddr",
    );
}

#[test]
fn a_forward_policy_of_drop_is_worth_the_warning() {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    cluster.manifests.apply(&Cluster::node_port("web", Policy::Local, 30080), &cluster.backends()).unwrap();
    let _agents = Agent::start_all(&cluster.lab, |agent| agent).unwrap();
    let to = cluster.at(1, traffic_policy_testing::lab::Family::V4, 30080);
    cluster.answer(Protocol::Tcp, to).unwrap();
    let forward = Chain { family: Family::Ip, table: "filter", name: "FORWARD", forward: Some(true) };
    cluster.lab.node(1).netns().nft_chain(&forward).unwrap();
    let outcome = cluster.ask(Protocol::Tcp, to).unwrap();
    assert_eq!(outcome, Outcome::Silent);
    cluster.lab.node(1).netns().delete_nft_table(Family::Ip, "filter").unwrap();
    cluster.answer(Protocol::Tcp, to).unwrap();
}

#[test]
fn leftovers_of_kube_proxy() {
    let lab = one_node(Lab::builder());
    let node = lab.node(1).netns();
    node.nft_table(Family::Ip6, "kube-proxy").unwrap();
    check(&lab, &[]).only(
        "warning",
        "kube-proxy",
        "nftables table ip6 kube-proxy",
        "nft delete table ip6 kube-proxy",
    );
    node.delete_nft_table(Family::Ip6, "kube-proxy").unwrap();
    for name in ["KUBE-SERVICES", "KUBE-NODEPORTS"] {
        node.nft_chain(&Chain { family: Family::Ip, table: "nat", name, forward: None }).unwrap();
    }
    check(&lab, &[]).only(
        "warning",
        "kube-proxy",
        "iptables chains KUBE-NODEPORTS, KUBE-SERVICES",
        "kube-proxy --cleanup",
    );
    node.delete_nft_table(Family::Ip, "nat").unwrap();
    let bridge = async |net: traffic_policy_testing::netlink::Netlink| {
        net.bridge("kube-ipvs0", [2, 0, 0, 0, 0, 9], 1500).await
    };
    node.netlink(bridge).unwrap();
    check(&lab, &[]).only("warning", "kube-proxy", "device kube-ipvs0", "ip link delete kube-ipvs0");
    node.netlink(async |net| net.delete("kube-ipvs0").await).unwrap();
    check(&lab, &[]).is_well();
}
