//! `check` in namespaces that have one thing wrong each: it is found with its cure, and not found where it is right.
//! Needs root; without it each test fails with a sentence that says so.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

use std::net::{TcpListener, UdpSocket};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use aya::programs::SchedClassifier;
use aya::programs::tc::{NlOptions, TcAttachOptions, TcAttachType, TcHandle, qdisc_add_clsact};
use serde_json::Value;
use traffic_policy_agent::check::forward_policy_drop;
use traffic_policy_agent::dataplane::{self, Kernel, Sizes};
use traffic_policy_tests::agent::{self, Agent};
use traffic_policy_tests::cgroup::Cgroup;
use traffic_policy_tests::cluster::{Cluster, Protocol};
use traffic_policy_tests::lab::{Lab, LabBuilder};
use traffic_policy_tests::netns::Namespace;
use traffic_policy_tests::nftables::{Chain, Family};
use traffic_policy_tests::object::{Manifests, Policy};
use traffic_policy_tests::traffic::Outcome;
use traffic_policy_tests::xdp::Always;

/// What `check` says on a node.
#[derive(Debug)]
struct Said {
    code: Option<i32>,
    findings: Vec<Value>,
}

impl Said {
    /// Those that ask for something.
    fn complaints(&self) -> Vec<&Value> {
        self.findings.iter().filter(|finding| finding["severity"] != "ok").collect()
    }

    /// Exactly this one complaint, and the exit code that belongs to it.
    #[track_caller]
    fn only(&self, severity: &str, probe: &str, found: &str, cure: &str) {
        let complaints = self.complaints();
        assert_eq!(complaints.len(), 1, "{complaints:#?}");
        self.has(severity, probe, found, cure);
        assert_eq!(self.code, Some(i32::from(severity == "error")), "{self:#?}");
    }

    #[track_caller]
    fn has(&self, severity: &str, probe: &str, found: &str, cure: &str) {
        let contains = |finding: &Value, field: &str, text| {
            finding[field].as_str().is_some_and(|said| said.contains(text))
        };
        let is_it = |finding: &&Value| {
            finding["severity"] == severity
                && finding["probe"] == probe
                && contains(finding, "found", found)
                && contains(finding, "cure", cure)
        };
        assert!(
            self.findings.iter().any(|finding| is_it(&finding)),
            "no {severity} {probe} {found:?} → {cure:?} in {self:#?}"
        );
    }

    #[track_caller]
    fn is_well(&self) {
        assert_eq!(self.complaints(), [&Value::Null; 0]);
        assert_eq!(self.code, Some(0));
    }
}

fn check_in(namespace: &Namespace, pins: &Path, flags: &[&str]) -> Said {
    let mut command = Command::new(agent::program().unwrap());
    command.args(["check", "--output", "json", "--pin-dir"]).arg(pins).args(flags).env_clear();
    let output = namespace.output(command).unwrap();
    let findings: Vec<Value> = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    Said { code: output.status.code(), findings }
}

/// On the first node.
fn check(lab: &Lab, flags: &[&str]) -> Said {
    check_in(lab.node(1).netns(), &lab.bpffs().join("node-1"), flags)
}

fn one_node(builder: LabBuilder) -> Lab {
    builder.pods(&[1]).build().unwrap()
}

#[test]
fn a_fit_node_has_no_complaints_and_a_table_for_people() {
    let lab = one_node(Lab::builder());
    let said = check(&lab, &[]);
    said.is_well();
    let probes: Vec<_> = said.findings.iter().map(|finding| finding["probe"].as_str().unwrap()).collect();
    for probe in [
        "kernel",
        "btf",
        "bpf-jit",
        "capabilities",
        "socket-destroy",
        "bpffs",
        "cgroup",
        "device",
        "mtu",
        "offload",
        "xdp-program",
        "tc-programs",
        "forwarding",
        "rp-filter",
        "kube-proxy",
        "forward-policy",
        "local-port-range",
        "pool",
        "listener",
    ] {
        assert!(probes.contains(&probe), "no {probe} in {probes:?}");
    }
    let mut command = Command::new(agent::program().unwrap());
    command.args(["check", "--device", "eth9", "--pin-dir"]).arg(lab.bpffs()).env_clear();
    let output = lab.node(1).netns().output(command).unwrap();
    let table = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1));
    for text in ["CHECK", "ok", "error", "there is no device eth9 (there are: lo, ", "→ correct --device"] {
        assert!(table.contains(text), "no {text:?} in\n{table}");
    }
    assert_eq!(
        String::from_utf8(output.stderr).unwrap(),
        "traffic-policy-agent: one error: see above what to do about it\n"
    );
}

#[test]
fn folders() {
    let lab = one_node(Lab::builder());
    check_in(lab.node(1).netns(), &lab.logs(), &[]).only(
        "error",
        "bpffs",
        "is not on a BPF file system",
        "mount -t bpf",
    );
    std::fs::create_dir_all(lab.bpffs().join("old/v999/links")).unwrap();
    check_in(lab.node(1).netns(), &lab.bpffs().join("old"), &[]).only(
        "error",
        "bpffs",
        "another layout (v999)",
        "cleanup --pin-dir",
    );
    check(&lab, &["--cgroup", "none"]).only("note", "cgroup", "are not served", "--cgroup");
    check(&lab, &["--cgroup", "/proc"]).only("error", "cgroup", "/proc is not on cgroup2", "findmnt");
    let cgroup = Cgroup::create("tp-check").unwrap();
    let path = cgroup.path().to_str().unwrap();
    check(&lab, &["--cgroup", path]).only("warning", "cgroup", "is not the root of the cgroups", "hostPath");
    let above = cgroup.path().parent().unwrap().to_str().unwrap();
    check(&lab, &["--cgroup", above]).is_well();
}

#[test]
fn a_veth_with_checksum_offload() {
    let lab = one_node(Lab::builder().wire_offloads(true));
    let off = "ethtool -K eth0 tx off";
    check(&lab, &[]).only("note", "offload", "eth0 is a veth with checksum offload", off);
    check(&lab, &["--attach", "xdp"]).only("warning", "offload", "XDP cannot tell", off);
    lab.node(1).netns().set_offloads("eth0", false).unwrap();
    check(&lab, &["--attach", "xdp"]).is_well();
}

#[test]
fn programs_of_others_and_of_an_agent_that_runs() {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let (lab, node) = (&cluster.lab, cluster.lab.node(1).netns());
    node.attach_xdp("eth0", Always::Pass).unwrap();
    let off = "ip link set eth0 xdp off";
    check(lab, &[]).only("warning", "xdp-program", "is on eth0: it sees packets first", off);
    check(lab, &["--attach", "xdp"]).only(
        "error",
        "xdp-program",
        "two cannot be on one device",
        "--attach tc",
    );
    node.detach_xdp("eth0").unwrap();
    check(lab, &["--attach", "xdp"]).is_well();

    let mut agents = Agent::start_all(lab, |agent| agent.attach("xdp")).unwrap();
    let process = agents[0].pid().unwrap();
    let own = check(lab, &["--attach", "xdp"]);
    own.has("note", "bpffs", "an agent uses", "second `run`");
    own.has("note", "bpffs", &format!("(process {process})"), "second `run`");
    own.has(
        "note",
        "listener",
        &format!("0.0.0.0:10256 (--healthz-address) is taken by traffic-policy- (process {process})"),
        "nothing",
    );
    assert!(
        !own.findings
            .iter()
            .any(|finding| finding["severity"] == "warning" || finding["severity"] == "error"),
        "{own:#?}"
    );
    // Seen from another folder its programs are somebody else's.
    let others = check_in(node, &lab.bpffs().join("other"), &["--attach", "xdp"]);
    others.has("error", "xdp-program", "another XDP program xdp_ingress", "--attach tc");
    others.has("note", "tc-programs", "tcx program tc_ingress", "bpftool net detach");
    others.has("note", "tc-programs", "at egress", "clean-up");
    others.has("error", "listener", "10256", "--healthz-address");
    assert_eq!(others.code, Some(1));
    agents[0].stop().unwrap();
    check(lab, &["--attach", "xdp"]).is_well();
}

#[test]
fn filters_of_clsact() {
    let lab = one_node(Lab::builder());
    let node = lab.node(1).netns();
    let sizes = Sizes { flows4: 64, flows6: 64, pending: 64 };
    let mut object = dataplane::load(sizes, None, &Kernel::running().unwrap()).unwrap();
    dataplane::load_programs(&mut object).unwrap();
    let mut filter = |hook, name: &str, priority| {
        let program: &mut SchedClassifier = object.program_mut(name).unwrap().try_into().unwrap();
        let handle = TcHandle::from(1);
        let options = TcAttachOptions::Netlink(NlOptions { priority, handle, ..NlOptions::default() });
        let link = node.run(|| {
            // There already for the second one.
            qdisc_add_clsact("eth0").ok();
            program.attach_with_options("eth0", hook, options).unwrap()
        });
        // It stays with the device; letting it go would look for the device here.
        std::mem::forget(program.take_link(link).unwrap());
    };
    // As an agent attaches below Linux 6.6.
    filter(TcAttachType::Ingress, "tc_ingress", 0x7470);
    check(&lab, &[]).is_well();
    filter(TcAttachType::Egress, "tc_egress", 50);
    let found = "TC hooks of eth0, too, and may take packets: bpf filter tc_egress (priority 50) at egress";
    check(&lab, &[]).only("note", "tc-programs", found, "tc qdisc del dev eth0 clsact");
}

#[test]
fn forwarding_and_rp_filter() {
    let lab = one_node(Lab::builder());
    let node = lab.node(1).netns();
    node.sysctl("net.ipv4.ip_forward", "0").unwrap();
    check(&lab, &[]).only(
        "error",
        "forwarding",
        "IPv4 forwarding is off on eth0",
        "sysctl -w net.ipv4.ip_forward=1",
    );
    node.sysctls(&[("net.ipv4.ip_forward", "1"), ("net.ipv6.conf.all.forwarding", "0")]).unwrap();
    check(&lab, &[]).only(
        "warning",
        "forwarding",
        "IPv6 forwarding is off on eth0",
        "net.ipv6.conf.all.forwarding=1",
    );
    node.sysctls(&[("net.ipv6.conf.all.forwarding", "1"), ("net.ipv4.conf.all.rp_filter", "1")]).unwrap();
    // One uplink.
    check(&lab, &["--device", "eth0"]).is_well();

    let lab = one_node(Lab::builder().two_uplinks());
    let both = ["--device", "eth0,eth1"];
    check(&lab, &both).is_well();
    lab.node(1).netns().sysctl("net.ipv4.conf.eth1.rp_filter", "1").unwrap();
    check(&lab, &both).only(
        "warning",
        "rp-filter",
        "strict on eth1",
        "sysctl -w net.ipv4.conf.eth1.rp_filter=2",
    );
}

#[test]
fn a_forward_policy_of_drop() {
    let lab = one_node(Lab::builder());
    let node = lab.node(1).netns();
    let chain = |family, table, name, forward| Chain { family, table, name, forward };
    // As kubelet and an accepting firewall leave them.
    node.nft_chain(&chain(Family::Ip, "nat", "KUBE-MARK-MASQ", None)).unwrap();
    node.nft_chain(&chain(Family::Inet, "fire", "fwd", Some(false))).unwrap();
    check(&lab, &[]).is_well();
    assert_eq!(node.run(forward_policy_drop), []);

    node.nft_chain(&chain(Family::Ip, "filter", "FORWARD", Some(true))).unwrap();
    let said = check(&lab, &[]);
    said.only(
        "warning",
        "forward-policy",
        "chain FORWARD of nftables table ip filter has policy DROP",
        "iptables -I FORWARD -d",
    );
    let [finding] = node.run(forward_policy_drop).try_into().unwrap();
    assert_eq!(serde_json::to_value(finding).unwrap(), *said.complaints()[0]);
    // As Docker leaves it.
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
    let to = cluster.at(1, traffic_policy_tests::lab::Family::V4, 30080);
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
    let bridge = async |net: traffic_policy_tests::netlink::Netlink| {
        net.bridge("kube-ipvs0", [2, 0, 0, 0, 0, 9], 1500).await
    };
    node.netlink(bridge).unwrap();
    check(&lab, &[]).only("warning", "kube-proxy", "device kube-ipvs0", "ip link delete kube-ipvs0");
    node.netlink(async |net| net.delete("kube-ipvs0").await).unwrap();
    check(&lab, &[]).is_well();
}

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
        "pool",
        "ports are left as sources",
        "ip_local_port_range=\"32768 60999\"",
    );
    range("32768 60999");
    check(&lab, &["--pool-ports", "40000-41000"]).only("error", "pool", "only 0 ports", "--pool-ports");
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
    // Datagrams: another protocol is another port.
    let _datagrams = node.run(|| UdpSocket::bind("0.0.0.0:32002").unwrap());
    check(&lab, &with_manifests).is_well();

    std::fs::write(manifests.folder().join("broken.yaml"), "kind: [").unwrap();
    let said = check(&lab, &with_manifests);
    said.has("error", "manifests", "broken.yaml", "correct the manifests");
    assert_eq!(said.code, Some(1));
}

#[test]
fn nothing_is_changed() {
    let lab = one_node(Lab::builder());
    let node = lab.node(1).netns();
    let state = || (node.attached("eth0").unwrap(), std::fs::read_dir(lab.bpffs()).unwrap().count());
    let before = state();
    check(&lab, &["--attach", "xdp"]).is_well();
    assert_eq!(state(), before);
    // And an agent may start meanwhile: no lock is in its way.
    let agents = Agent::start_all(&lab, |agent| agent.attach("xdp")).unwrap();
    agents[0].wait_ready(Duration::from_secs(20)).unwrap();
}
