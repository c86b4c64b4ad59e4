//! Questions to another node whether it is alive, in namespaces: it is, or it is not, or part of it
//! answers.

use std::net::{IpAddr, SocketAddr, TcpListener};

use traffic_policy_cluster::model::Protocol;
use traffic_policy_dataplane::node::{Answer, Asker, NeighbourManager, Network, Question, Sign};
use traffic_policy_testing::impaired::{ImpairedWay, Impairment};
use traffic_policy_testing::lab::{Family, Lab, Node};
use traffic_policy_testing::netns::Namespace;
use traffic_policy_testing::nftables;

const HEALTH_PORT: u16 = 10256;
const PORT: u16 = 8080;

fn lab() -> Lab {
    Lab::builder().nodes(2).pods(&[1, 1]).build().unwrap()
}

fn addresses(node: &Node) -> Vec<IpAddr> {
    Family::BOTH.map(|family| node.address(family)).to_vec()
}

fn endpoint(address: IpAddr) -> (SocketAddr, Protocol) {
    (SocketAddr::new(address, PORT), Protocol::Tcp)
}

/// All that is known of a node with one pod.
fn whole(node: &Node) -> Question {
    let endpoints = Family::BOTH.map(|family| endpoint(node.pod(1).address(family)));
    Question {
        addresses: addresses(node),
        endpoints: endpoints.to_vec(),
        health_port: HEALTH_PORT,
        hop: None,
    }
}

fn ask(from: &Namespace, question: &Question) -> Answer {
    let question = question.clone();
    from.block_on(async || Asker::default().ask(question).await)
}

fn is_alive(answer: &Answer) -> bool {
    matches!(answer, Answer::Alive(_))
}

#[test]
fn a_node_that_is_cut_off_is_silent_until_it_is_back() {
    let lab = lab();
    let (here, far) = (lab.node(1).netns(), lab.node(2));
    let question = whole(far);
    for known in [true, false] {
        let answer = ask(here, &question);
        assert!(is_alive(&answer), "{answer:?}");
        lab.cut(far).unwrap();
        if !known {
            lab.flush_neighbours().unwrap();
        }
        let Answer::Silent(asked) = ask(here, &question) else { panic!("it is cut off") };
        for address in addresses(far) {
            let port = SocketAddr::new(address, HEALTH_PORT);
            for sign in [Sign::Neighbour(address), Sign::Echo(address), Sign::Tcp(port)] {
                assert!(asked.contains(&sign), "{sign} of {asked:?}");
            }
        }
        for (endpoint, _) in &question.endpoints {
            assert!(
                asked.contains(&Sign::Echo(endpoint.ip())) && asked.contains(&Sign::Tcp(*endpoint)),
                "{asked:?}"
            );
        }
        lab.mend(far).unwrap();
    }
}

/// The agent has the kernel keep the entries of next hops resolved. Such an entry says "reachable"
/// for up to 45 s after its last answer.
#[test]
fn a_node_whose_neighbour_entry_is_managed_is_silent_as_well() {
    let lab = lab();
    let (here, far) = (lab.node(1).netns(), lab.node(2));
    let question = whole(far);
    assert!(is_alive(&ask(here, &question)));
    here.block_on(async || {
        let (network, _events) = Network::connect().unwrap();
        let link = network.device_towards(far.address(Family::V4)).await.unwrap();
        let hops = addresses(far).into_iter().map(|address| (link, address));
        NeighbourManager::default().keep(&network, hops).await;
    });
    let managed = || here.netlink(async |net| net.managed_neighbours().await).unwrap();
    assert_eq!(managed(), 2);
    let answer = ask(here, &question);
    assert!(is_alive(&answer), "{answer:?}");
    lab.cut(far).unwrap();
    for _ in 0..2 {
        let answer = ask(here, &question);
        assert!(matches!(answer, Answer::Silent(_)), "{answer:?}");
    }
    lab.mend(far).unwrap();
    let answer = ask(here, &question);
    assert!(is_alive(&answer), "{answer:?}");
    assert_eq!(managed(), 2, "the kernel goes on keeping them");
}

/// A firewall on the node, and pods that are behind it.
#[test]
fn a_node_that_drops_icmp_and_tcp_is_alive_by_arp() {
    let lab = lab();
    let (here, far) = (lab.node(1).netns(), lab.node(2));
    far.netns().nft_drop_input(nftables::Family::Ip, "deaf").unwrap();
    let address = far.address(Family::V4);
    let question =
        Question { addresses: vec![address], endpoints: Vec::new(), health_port: HEALTH_PORT, hop: None };
    // The entry is unknown, then known, and then probed already.
    lab.flush_neighbours().unwrap();
    for _ in 0..3 {
        assert_eq!(ask(here, &question), Answer::Alive(Sign::Neighbour(address)));
    }
    // In IPv6 the firewall would drop NDP as well.
    let deaf = Question {
        addresses: Vec::new(),
        endpoints: vec![endpoint(address)],
        health_port: HEALTH_PORT,
        hop: None,
    };
    let answer = ask(here, &deaf);
    assert!(matches!(answer, Answer::Silent(_)), "the control: nothing else answers: {answer:?}");
}

/// The kernel answers for a process that does not.
#[test]
fn a_stopped_process_is_no_dead_node() {
    let lab = lab();
    let (here, pod) = (lab.node(1).netns(), lab.node(2).pod(1));
    let address = pod.address(Family::V4);
    pod.netns().sysctl("net.ipv4.icmp_echo_ignore_all", "1").unwrap();
    let question = Question { endpoints: vec![endpoint(address)], ..Question::default() };
    let answers = Answer::Alive(Sign::Tcp(SocketAddr::new(address, PORT)));
    assert_eq!(ask(here, &question), answers, "a reset");
    // Nobody accepts.
    let _listener = pod.netns().run(|| TcpListener::bind((address, PORT)).unwrap());
    assert_eq!(ask(here, &question), answers);
    lab.cut(lab.node(2)).unwrap();
    assert!(matches!(ask(here, &question), Answer::Silent(_)));
}

#[test]
fn a_node_behind_a_router_is_asked_without_arp() {
    let lab = lab();
    let (client, far) = (lab.client().netns(), lab.node(2));
    let question =
        Question { addresses: addresses(far), endpoints: Vec::new(), health_port: HEALTH_PORT, hop: None };
    let answer = ask(client, &question);
    assert!(matches!(answer, Answer::Alive(Sign::Echo(_) | Sign::Tcp(_))), "{answer:?}");
    lab.cut(far).unwrap();
    let Answer::Silent(asked) = ask(client, &question) else { panic!("it is cut off") };
    assert!(!asked.iter().any(|sign| matches!(sign, Sign::Neighbour(_))), "{asked:?}");
    assert_eq!(asked.len(), 4, "{asked:?}");
}

/// Each of twelve questions is answered with a chance of a quarter: one of thirty nodes is silent.
#[test]
fn a_way_that_loses_half_of_all_packets_is_no_death() {
    let lab = lab();
    let _way = ImpairedWay::start(&lab, Impairment { lose: 2, ..Impairment::default() }).unwrap();
    let question = Question {
        addresses: addresses(lab.node(2)),
        endpoints: Vec::new(),
        health_port: HEALTH_PORT,
        hop: None,
    };
    let answers: Vec<_> = (0..10).map(|_| ask(lab.client().netns(), &question)).collect();
    let silent = answers.iter().filter(|answer| !is_alive(answer)).count();
    assert!(silent <= 3, "{answers:?}");
}

/// ARP and NDP are lost as well, and nothing else can be asked before one of them is answered. Each
/// of the six questions is answered with a chance of a quarter: one node of six is silent. If the
/// kernel asked only once, as it does within a second, it would be every second one.
#[test]
fn a_way_that_loses_half_of_all_packets_to_unknown_neighbours_is_rarely_a_death() {
    let lab = lab();
    let rules = "table bridge lossy { chain c { type filter hook forward priority 0; \
                 numgen random mod 100 < 50 drop\n }\n }\n";
    lab.router().feed("nft", &["-f", "-"], rules).unwrap();
    let question = whole(lab.node(2));
    let answers: Vec<_> = (0..60)
        .map(|_| {
            lab.flush_neighbours().unwrap();
            ask(lab.node(1).netns(), &question)
        })
        .collect();
    let silent = answers.iter().filter(|answer| !is_alive(answer)).count();
    println!("{silent} of {} times silent", answers.len());
    assert!(silent <= 20, "{answers:?}");
}

/// Nothing is sent where no route leads, and that proves nothing.
#[test]
fn a_node_without_a_way_to_it_is_not_judged() {
    let lab = lab();
    let nowhere = Question { addresses: vec![IpAddr::from([203, 0, 113, 1])], ..whole(lab.node(2)) };
    let lonely = Namespace::create(&format!("{}-lonely", lab.id())).unwrap();
    let answer = ask(&lonely, &nowhere);
    assert!(matches!(&answer, Answer::Unjudged(why) if why.contains("cannot be asked")), "{answer:?}");
}
