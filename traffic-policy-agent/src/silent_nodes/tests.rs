use proptest::prelude::*;

use super::*;

/// A cluster of this node and others, of which some are dead in truth.
struct Cluster {
    machine: SilentNodes,
    now: Instant,
    dead: BTreeSet<String>,
    /// The gateway; `None`: there is none.
    gateway: Option<Heard>,
    /// The heartbeats of Nodes.
    beats: BTreeMap<String, Heartbeat>,
    /// The events, in words.
    told: Vec<String>,
}

fn silent() -> Heard {
    Heard::Silent("ping".to_owned())
}

impl Cluster {
    fn new(others: &[&str], most: u8) -> Self {
        let mut machine = SilentNodes::new("here".to_owned(), most);
        machine.follow(&others.iter().copied().chain(["here"]).collect());
        Self {
            machine,
            now: Instant::now(),
            dead: BTreeSet::new(),
            gateway: Some(Heard::Alive),
            beats: BTreeMap::new(),
            told: Vec::new(),
        }
    }

    fn kill(&mut self, nodes: &[&str]) {
        self.dead.extend(nodes.iter().map(|&node| node.to_owned()));
    }

    fn suspect(&mut self, node: &str) {
        let effects = self.machine.suspect(node, self.now);
        self.follow(effects);
    }

    /// Answers all questions as the truth is, each after some time.
    fn follow(&mut self, mut effects: Vec<Effect>) {
        while !effects.is_empty() {
            let mut next = Vec::new();
            for effect in effects {
                if let Effect::Look(node) = &effect {
                    if let Some(heartbeat) = self.beats.get(node).cloned() {
                        next.extend(self.machine.heartbeat(node, heartbeat, self.now));
                    }
                    continue;
                }
                let Effect::Ask(subject) = effect else {
                    self.told.push(match effect {
                        Effect::Ask(_) | Effect::Look(_) => continue,
                        Effect::Cleared(node) => format!("{node} lives"),
                        Effect::Died { node, .. } => format!("{node} died"),
                        Effect::Returned { node, unheard: true, .. } => format!("{node} returned unheard"),
                        Effect::Returned { node, .. } => format!("{node} returned"),
                        Effect::Removed(node) => format!("{node} removed"),
                        Effect::CutOff => "cut off".to_owned(),
                        Effect::Rejoined(_) => "rejoined".to_owned(),
                        Effect::TooMany { dead, most } => format!("{dead} of {most}"),
                    });
                    continue;
                };
                let heard = match &subject {
                    Subject::Gateway => self.gateway.clone().unwrap_or(Heard::Absent),
                    Subject::Node(node) if self.dead.contains(node) => silent(),
                    Subject::Node(_) => Heard::Alive,
                };
                self.now += Duration::from_millis(1);
                next.extend(self.machine.hear(&subject, heard, self.now));
            }
            effects = next;
        }
    }

    fn pass(&mut self, seconds: u32) {
        for _ in 0..seconds {
            self.now += AGAIN;
            let effects = self.machine.tick(self.now);
            self.follow(effects);
        }
    }

    fn told(&mut self) -> Vec<String> {
        std::mem::take(&mut self.told)
    }

    fn left_out(&self) -> Vec<&str> {
        self.machine.left_out().iter().map(|left_out| left_out.node).collect()
    }
}

#[test]
fn one_dies_and_returns() {
    let mut cluster = Cluster::new(&["a", "b", "c"], 50);
    cluster.suspect("a");
    assert_eq!(cluster.told(), ["a lives"]);
    assert!(!cluster.machine.is_active());
    cluster.kill(&["a"]);
    cluster.suspect("a");
    cluster.suspect("a");
    assert_eq!(cluster.told(), ["a died"]);
    assert_eq!(cluster.left_out(), ["a"]);
    cluster.pass(30);
    assert_eq!((cluster.told(), cluster.left_out()), (vec![], vec!["a"]));
    cluster.dead.clear();
    cluster.pass(1);
    assert_eq!(cluster.left_out(), ["a"], "one answer may be luck");
    cluster.pass(1);
    assert_eq!((cluster.told(), cluster.left_out()), (vec!["a returned".to_owned()], vec![]));
    assert!(!cluster.machine.is_active());
    // Soon after, it has to answer longer.
    cluster.kill(&["a"]);
    cluster.suspect("a");
    cluster.dead.clear();
    cluster.pass(3);
    assert_eq!(cluster.left_out(), ["a"]);
    cluster.pass(1);
    assert_eq!(cluster.told(), ["a died", "a returned"]);
}

/// An answer in between is no row.
#[test]
fn answers_count_only_in_a_row() {
    let mut cluster = Cluster::new(&["a", "b", "c"], 50);
    cluster.kill(&["a"]);
    cluster.suspect("a");
    for _ in 0..5 {
        cluster.dead.clear();
        cluster.pass(1);
        cluster.kill(&["a"]);
        cluster.pass(1);
    }
    assert_eq!(cluster.left_out(), ["a"]);
}

#[test]
fn no_more_than_half_are_left_out_and_the_oldest_stay() {
    let mut cluster = Cluster::new(&["a", "b", "c", "d"], 50);
    for node in ["c", "a", "b"] {
        cluster.kill(&[node]);
        cluster.pass(3);
        cluster.suspect(node);
    }
    assert_eq!(cluster.told(), ["c died", "a died", "b died", "3 of 2"]);
    assert_eq!(cluster.left_out(), ["c", "a"]);
    cluster.dead.remove("c");
    cluster.pass(2);
    assert_eq!(cluster.left_out(), ["a", "b"], "the next takes its place");
    for most in [0, 19] {
        let mut cluster = Cluster::new(&["a", "b", "c", "d"], most);
        cluster.kill(&["a"]);
        cluster.suspect("a");
        assert_eq!(cluster.left_out(), [""; 0], "{most} %");
    }
}

#[test]
fn who_hears_nobody_is_cut_off_and_accuses_nobody() {
    for (others, gateway) in
        [(&["a", "b", "c", "d", "e"][..], Some(silent())), (&["a", "b"], None), (&["a"], Some(silent()))]
    {
        let mut cluster = Cluster::new(others, 50);
        cluster.gateway = gateway;
        cluster.kill(others);
        cluster.suspect("a");
        assert_eq!((cluster.told(), cluster.left_out()), (vec!["cut off".to_owned()], vec![]), "{others:?}");
        assert!(cluster.machine.is_cut_off());
        cluster.suspect("a");
        cluster.pass(5);
        assert_eq!(cluster.told(), [""; 0]);
        // The line is back, and who was accused is dead in truth only if it is silent still.
        let last = others[others.len() - 1];
        cluster.dead.remove(last);
        cluster.pass(20);
        let told = cluster.told();
        assert_eq!(told[0], "rejoined");
        assert!(!cluster.machine.is_cut_off());
        let expected = if last == "a" { vec![] } else { vec!["a"] };
        assert_eq!(cluster.left_out(), expected, "{told:?}");
    }
}

/// The gateway alone can tell, in a cluster of two nodes, whose fault the silence is.
#[test]
fn the_only_other_node_dies_if_the_gateway_answers_or_if_there_is_none() {
    for gateway in [Some(Heard::Alive), None] {
        let mut cluster = Cluster::new(&["a"], 50);
        cluster.gateway = gateway;
        cluster.kill(&["a"]);
        cluster.suspect("a");
        assert_eq!((cluster.told(), cluster.left_out()), (vec!["a died".to_owned()], vec!["a"]));
    }
}

/// An earlier death is part of the silence, if nothing is heard any more.
#[test]
fn a_line_that_breaks_after_a_death_is_noticed() {
    let mut cluster = Cluster::new(&["a", "b", "c"], 50);
    cluster.kill(&["a"]);
    cluster.suspect("a");
    assert_eq!(cluster.left_out(), ["a"]);
    cluster.pass(5);
    cluster.kill(&["b", "c"]);
    cluster.gateway = Some(silent());
    cluster.suspect("b");
    assert_eq!(cluster.told(), ["a died", "cut off"]);
    assert_eq!(cluster.left_out(), [""; 0]);
    cluster.dead = ["a".to_owned()].into();
    cluster.gateway = Some(Heard::Alive);
    cluster.pass(1);
    assert_eq!(cluster.left_out(), ["a"], "it is silent still");
}

#[test]
fn a_witness_that_is_silent_is_in_question_itself() {
    let mut cluster = Cluster::new(&["a", "b", "c", "d", "e", "f"], 50);
    cluster.kill(&["a", "b", "c"]);
    cluster.suspect("a");
    // Which witnesses are asked is a matter of chance; no living one was accused.
    let told = cluster.told();
    assert_eq!(told[0], "a died", "{told:?}");
    assert!(cluster.left_out().iter().all(|node| ["a", "b", "c"].contains(node)), "{told:?}");
}

fn beat(ready: bool, at: &str) -> Heartbeat {
    Heartbeat { ready, at: at.to_owned() }
}

/// The node is behind a firewall, and was never heard. The control: a node that answered once is
/// silent because it does not reach this one.
#[test]
fn a_node_that_cannot_be_asked_returns_by_a_newer_heartbeat() {
    for answered_before in [false, true] {
        let mut cluster = Cluster::new(&["a", "b", "c"], 50);
        if answered_before {
            cluster.suspect("a");
        }
        cluster.kill(&["a"]);
        cluster.suspect("a");
        cluster.beats.insert("a".to_owned(), beat(true, "10:00"));
        cluster.pass(800);
        assert_eq!(cluster.left_out(), ["a"], "its last heartbeat may be older than its death");
        cluster.beats.insert("a".to_owned(), beat(false, "10:05"));
        cluster.pass(800);
        assert_eq!(cluster.left_out(), ["a"], "it is not ready");
        cluster.told();
        cluster.beats.insert("a".to_owned(), beat(true, "10:10"));
        cluster.pass(800);
        if answered_before {
            assert_eq!((cluster.told(), cluster.left_out()), (vec![], vec!["a"]));
        } else {
            assert_eq!((cluster.told(), cluster.left_out()), (vec!["a returned unheard".to_owned()], vec![]));
        }
    }
}

/// Each death doubles what is needed, but not what a heartbeat needs.
#[test]
fn one_answer_suffices_with_a_newer_heartbeat() {
    for beats in [true, false] {
        let mut cluster = Cluster::new(&["a", "b", "c"], 50);
        cluster.kill(&["a"]);
        cluster.suspect("a");
        let first = cluster.machine.heartbeat("a", beat(true, "10:00"), cluster.now);
        assert_eq!(first, []);
        cluster.dead.clear();
        let at = if beats { "10:01" } else { "10:00" };
        let effects = cluster.machine.heartbeat("a", beat(true, at), cluster.now);
        assert_eq!(effects.len(), usize::from(beats), "it is asked at once");
        cluster.follow(effects);
        assert_eq!(cluster.left_out().is_empty(), beats);
    }
    let mut cluster = Cluster::new(&["a"], 50);
    assert_eq!(cluster.machine.heartbeat("a", beat(true, "10:00"), cluster.now), [], "it is not dead");
}

/// 5,000 nodes would read the Node of one that is dead.
#[test]
fn a_node_is_looked_at_rarely_and_not_by_all_at_once() {
    let looks = |own: &str| {
        let mut machine = SilentNodes::new(own.to_owned(), 50);
        machine.follow(&["a", "b", own].into());
        let start = Instant::now();
        let ask = Subject::Node("a".to_owned());
        machine.hear(&Subject::Gateway, Heard::Alive, start);
        machine.suspect("a", start);
        machine.hear(&ask, silent(), start);
        let seconds = (0..7200).filter(|second| {
            let effects = machine.tick(start + Duration::from_secs(*second));
            machine.hear(&ask, silent(), start + Duration::from_secs(*second));
            effects.contains(&Effect::Look("a".to_owned()))
        });
        seconds.collect::<Vec<_>>()
    };
    let (one, other) = (looks("here"), looks("there"));
    assert!(one[0] >= 60 && one[0] <= 121 && one.len() <= 16, "{one:?}");
    assert_ne!(one[0], other[0]);
}

/// A verdict needs silence that proves something.
#[test]
fn a_witness_without_evidence_decides_nothing() {
    let mut cluster = Cluster::new(&["a"], 50);
    cluster.gateway = Some(Heard::Nothing);
    cluster.kill(&["a"]);
    cluster.suspect("a");
    assert_eq!((cluster.told(), cluster.left_out()), (vec!["a lives".to_owned()], vec![]));
    let ask = cluster.machine.suspect("a", cluster.now);
    assert_eq!(ask, [Effect::Ask(Subject::Node("a".to_owned()))]);
    let effects = cluster.machine.hear(&Subject::Node("a".to_owned()), Heard::Nothing, cluster.now);
    assert_eq!(effects, [Effect::Cleared("a".to_owned())]);
}

#[test]
fn it_ends_when_kubernetes_removes_the_endpoints() {
    let mut cluster = Cluster::new(&["a", "b", "c"], 50);
    cluster.kill(&["a"]);
    cluster.suspect("a");
    let effects = cluster.machine.follow(&["b", "c", "here"].into());
    assert_eq!(effects, [Effect::Removed("a".to_owned())]);
    assert_eq!(cluster.left_out(), [""; 0]);
    cluster.suspect("a");
    cluster.suspect("here");
    assert!(!cluster.machine.is_active(), "not of interest");
}

proptest! {
    /// Whatever happens: no more are left out than allowed, nobody while cut off, never this node,
    /// and once all answer again everybody returns.
    #[test]
    fn the_living_come_back(
        steps in prop::collection::vec((0..5usize, any::<bool>(), any::<bool>(), 0..4u32), 0..40),
        most in 0..=100u8,
    ) {
        let names = ["a", "b", "c", "d", "e"];
        let mut cluster = Cluster::new(&names, most);
        for (node, dies, gateway, seconds) in steps {
            if dies {
                cluster.kill(&[names[node]]);
            } else {
                cluster.dead.remove(names[node]);
            }
            cluster.gateway = Some(if gateway { Heard::Alive } else { silent() });
            cluster.suspect(names[node]);
            cluster.pass(seconds);
            let left_out = cluster.left_out();
            prop_assert!(left_out.len() <= 6 * usize::from(most) / 100);
            prop_assert!(!cluster.machine.is_cut_off() || left_out.is_empty());
            prop_assert!(!left_out.contains(&"here"));
        }
        cluster.dead.clear();
        cluster.gateway = Some(Heard::Alive);
        cluster.pass(70);
        prop_assert!(!cluster.machine.is_active(), "{:?}", cluster.machine);
    }
}
