//! Port conflicts.

use std::net::{TcpListener, UdpSocket};

use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::Lab;
use traffic_policy_testing::object::{Manifests, Policy};

use crate::output::{check, one_node};

#[test]
fn ports_that_two_sides_want() {
    let lab = one_node(Lab::builder());
    let node = lab.node(1).netns();
    let range = |text| node.sysctl("net.ipv4.ip_local_port_range", text).unwrap();
    range("31000 60999");
    let reserve = "sysctl -w net.ipv4.ip_local_reserved_ports=31000-32767";
    check(&lab, &[]).only("warning", "local-port-range", "gives node ports (31000 to 32767)", reserve);
    node.sysctl("net.ipv4.ip_local_reserved_ports", "30000-32767").unwrap();
    check(&lab, &[]).is_well();
    range("4000 65535");
    check(&lab, &[]).only(
        "error",
        "snat-ports",
        "ports are left as sources",
        "ip_local_port_range=\"32768 60999\"",
    );
    range("32768 60999");
    check(&lab, &["--snat-ports", "40000-41000"]).only("error", "snat-ports", "only 0 ports", "--snat-ports");
    check(&lab, &["--node-ports", "40000-41000"]).only(
        "warning",
        "local-port-range",
        "(40000 to 41000)",
        "40000-41000",
    );
    check(&lab, &[]).is_well();
}

#[test]
fn listeners() {
    let lab = one_node(Lab::builder());
    let node = lab.node(1).netns();
    let listen = |address: &'static str| node.run(|| TcpListener::bind(address).unwrap());
    let process = std::process::id();

    let healthz = listen("0.0.0.0:10256");
    let taken = "0.0.0.0:10256 (--healthz-address) is taken by check-";
    check(&lab, &[]).only("error", "listener", taken, "choose another --healthz-address");
    check(&lab, &[]).only("error", "listener", &format!("(process {process})"), "kube-proxy");
    check(&lab, &["--healthz-address", "0.0.0.0:10255"]).is_well();
    drop(healthz);
    let metrics = listen("[::1]:10249");
    check(&lab, &[]).is_well();
    check(&lab, &["--metrics-address", "[::1]:10249"]).only(
        "error",
        "listener",
        "[::1]:10249",
        "--metrics-address",
    );
    drop(metrics);
    // With `none`, `run` does not listen, so the default port may be taken.
    let metrics = listen("127.0.0.1:10249");
    check(&lab, &["--metrics-address", "none"]).is_well();
    drop(metrics);

    let server = listen("[::]:30081");
    check(&lab, &[]).only("note", "listener", "TCP port 30081, in the range of node ports", "--node-ports");
    let manifests = Manifests::of(&lab).unwrap();
    manifests.apply(&Cluster::node_port("web", Policy::Cluster, 30081), &[]).unwrap();
    let folder = manifests.folder().to_str().unwrap();
    let with_manifests = ["--manifests", folder, "--node-name", "node-1", "--node-ports", "20000-20010"];
    check(&lab, &with_manifests).only(
        "warning",
        "listener",
        "the node port of Service default/web",
        "another nodePort",
    );
    drop(server);
    check(&lab, &with_manifests).is_well();

    let balanced = Cluster::node_port("vip", Policy::Local, 30082)
        .vip("203.0.113.1".parse().unwrap())
        .health_port(32002);
    manifests.apply(&balanced, &[]).unwrap();
    let health = listen("0.0.0.0:32002");
    check(&lab, &with_manifests).only(
        "error",
        "listener",
        "the healthCheckNodePort of Service default/vip",
        "elsewhere",
    );
    drop(health);
    // The protocol is UDP: another protocol is another port.
    let _datagrams = node.run(|| UdpSocket::bind("0.0.0.0:32002").unwrap());
    check(&lab, &with_manifests).is_well();

    std::fs::write(manifests.folder().join("broken.yaml"), "kind: [").unwrap();
    let checked = check(&lab, &with_manifests);
    checked.has("error", "manifests", "broken.yaml", "correct the manifests");
    assert_eq!(checked.code, Some(1));
}
