//! `lb watch` with manifests that change: lines in a file, a view on a terminal, and each way to
//! end it.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use nix::pty::{OpenptyResult, Winsize, openpty};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use traffic_policy_testing::api_server::{ApiServer, Kind};
use traffic_policy_testing::pace::{until, wait_for};
use traffic_policy_testing::plugin;

const SOON: Duration = Duration::from_secs(30);

const NODES: &str = "\
apiVersion: v1
kind: Node
metadata: {name: node-1}
---
apiVersion: v1
kind: Node
metadata: {name: gke-cluster-with-a-name-that-is-very-long-default-pool-of-machines-12345678-abcd}
";
const SECOND: &str = "gke-cluster-with-a-name-that-is-very-long-default-pool-of-machines-12345678-abcd";

const SERVICE: &str = "\
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default, uid: web}
spec:
  type: LoadBalancer
  externalTrafficPolicy: Local
  healthCheckNodePort: 32080
  clusterIP: 10.96.0.1
  clusterIPs: [10.96.0.1]
  ipFamilies: [IPv4]
  ports: [{port: 80, nodePort: 30080, protocol: TCP}]
";

fn slice(nodes: &[&str]) -> String {
    let mut text = "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\n\
         metadata: {name: web-1, namespace: default, labels: {kubernetes.io/service-name: web}}\n\
         ports: [{name: '', port: 8080, protocol: TCP}]\n"
        .to_owned();
    text += if nodes.is_empty() { "endpoints: []\n" } else { "endpoints:\n" };
    for (at, node) in nodes.iter().enumerate() {
        text += &format!(
            "- {{addresses: [10.244.0.{}], nodeName: {node}, conditions: {{ready: true, serving: true, terminating: false}}}}\n",
            at + 1
        );
    }
    text
}

/// Replaces a file atomically, so that no reader sees a part of it.
fn write(folder: &Path, name: &str, text: &str) {
    let temporary = folder.join(format!(".{name}.tmp"));
    fs::write(&temporary, text).unwrap();
    fs::rename(temporary, folder.join(name)).unwrap();
}

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "nodes.yaml", NODES);
    write(folder.path(), "service.yaml", SERVICE);
    write(folder.path(), "slice.yaml", &slice(&["node-1", SECOND]));
    folder
}

fn watch() -> Command {
    let mut command = Command::new(plugin::program().unwrap());
    command.args(["lb", "watch", "web", "--balancer", "gke"]).stdin(Stdio::null()).stderr(Stdio::null());
    command
}

/// A process that is killed at the end of a failed test.
struct Running(Child);

impl Running {
    fn start(command: &mut Command) -> Self {
        Self(command.spawn().unwrap())
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.id().try_into().unwrap()), signal).unwrap();
    }

    fn exit_code(&mut self) -> Option<i32> {
        wait_for("the end of lb watch", SOON, || self.0.try_wait().unwrap()).code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// The lines of a file that is being written, without their times.
fn lines(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap();
    text.lines()
        .map(|line| {
            let (time, rest) = line.split_once(' ').unwrap_or_else(|| panic!("no time: {line}"));
            // The form is 2026-11-22T18:04:59.312Z.
            assert!(time.len() == 24 && time.ends_with('Z') && time.as_bytes()[10] == b'T', "{line}");
            rest.to_owned()
        })
        .collect()
}

const BEGINNING: &str = "default/web: policy Local, 2 of 2 nodes healthy, 2 ready pods";
const UNHEALTHY: &str = "default/web: node-1: turns unhealthy: 200, 1 endpoint → 503; 1 → 0 pods; a request there: served → dropped; \
    gke knows within 6 s";
const HEALTHY: &str = "default/web: node-1: turns healthy: 503 → 200, 1 endpoint; 0 → 1 pod; a request there: dropped → served; \
    gke knows within 6 s";

#[test]
fn a_line_for_each_change_of_the_manifests() {
    let (folder, out) = (folder(), tempfile::NamedTempFile::new().unwrap());
    let seen = || lines(out.path());
    let file = File::create(out.path()).unwrap();
    let mut running = Running::start(watch().arg("--manifests").arg(folder.path()).stdout(file));
    until("the first state", SOON, || seen() == [BEGINNING]);
    write(folder.path(), "slice.yaml", &slice(&[SECOND]));
    until("a line for the node that turns unhealthy", SOON, || seen().iter().any(|line| line == UNHEALTHY));
    // A broken manifest changes nothing.
    let before = seen();
    write(folder.path(), "slice.yaml", "kind: [");
    write(folder.path(), "slice.yaml", &slice(&["node-1", SECOND]));
    until("a line for the node that turns healthy", SOON, || seen().iter().any(|line| line == HEALTHY));
    assert_eq!(seen()[..before.len()], before);
    fs::remove_file(folder.path().join("service.yaml")).unwrap();
    let gone = "default/web: is not reached from outside any more";
    until("a line for the end of the Service", SOON, || seen().last().is_some_and(|line| line == gone));
    let text = fs::read_to_string(out.path()).unwrap();
    assert!(!text.contains('\x1b'), "no terminal, no escape sequence: {text}");
    running.signal(Signal::SIGINT);
    assert_eq!(running.exit_code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_is_followed() {
    let server = ApiServer::start().unwrap();
    for text in [NODES, SERVICE, &slice(&["node-1", SECOND])] {
        text.split("---\n").for_each(|object| server.apply(object).unwrap());
    }
    let (access, out) = (tempfile::tempdir().unwrap(), tempfile::NamedTempFile::new().unwrap());
    let kubeconfig = access.path().join("kubeconfig");
    server.write_kubeconfig(&kubeconfig).unwrap();
    let file = File::create(out.path()).unwrap();
    let mut running = Running::start(watch().arg("--kubeconfig").arg(&kubeconfig).stdout(file));
    let seen = || lines(out.path());
    until("the first state", SOON, || seen() == [BEGINNING]);
    server.apply(&slice(&[SECOND])).unwrap();
    until("a line for the node that turns unhealthy", SOON, || seen().iter().any(|line| line == UNHEALTHY));
    server.delete(Kind::Node, "", "node-1");
    until("a line for the Node", SOON, || seen().iter().any(|line| line == "node-1: the Node is gone"));
    assert!(server.posted_events().is_empty(), "it only reads");
    running.signal(Signal::SIGTERM);
    assert_eq!(running.exit_code(), Some(0));
}

/// A Lease by which a node says what it opens, and what its agent runs with.
fn lease(node: &str, opens: &str) -> String {
    format!(
        "apiVersion: coordination.k8s.io/v1\nkind: Lease\nmetadata:\n  name: traffic-policy-opens-{node}\n  \
         namespace: opening\n  labels: {{traffic-policy.io/opens: {opens}}}\n  annotations: \
         {{traffic-policy.io/opens-from: 192.0.2.1, traffic-policy.io/opens-l2-by: direct random 16381 1}}\n\
         spec: {{holderIdentity: {node}}}\n"
    )
}

/// The Service under policy Cluster, with these annotations.
fn under_cluster(annotations: &str) -> String {
    SERVICE
        .replace("Local\n  healthCheckNodePort: 32080", "Cluster")
        .replace("uid: web", &format!("uid: web, annotations: {{{annotations}}}"))
}

const BEGINNING_UNDER_CLUSTER: &str = "default/web: policy Cluster, 2 of 2 nodes healthy, 2 ready pods";
const OPENS_NOTHING: &str =
    "default/web: warning opens-nothing: default/web is forwarded directly, but node node-1 opens no packets";
const OVER: &str = "default/web: opens-nothing is over";

/// The beginning and the end of what is found, in turn.
fn openings(path: &Path) -> Vec<bool> {
    let all = lines(path).into_iter();
    all.filter(|line| line.contains("opens-nothing"))
        .map(|line| {
            assert!(line == OVER || line.starts_with(OPENS_NOTHING), "{line}");
            line != OVER
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_of_direct_forwarding_are_followed() {
    let server = ApiServer::start().unwrap();
    let objects = [NODES.to_owned(), under_cluster(""), slice(&["node-1", SECOND])];
    for text in objects.iter().chain(&[lease("node-1", "ipip"), lease(SECOND, "ipip")]) {
        text.split("---\n").for_each(|object| server.apply(object).unwrap());
    }
    let (access, out) = (tempfile::tempdir().unwrap(), tempfile::NamedTempFile::new().unwrap());
    let kubeconfig = access.path().join("kubeconfig");
    server.write_kubeconfig(&kubeconfig).unwrap();
    let file = File::create(out.path()).unwrap();
    let _running = Running::start(watch().arg("--kubeconfig").arg(&kubeconfig).stdout(file));
    until("the first state", SOON, || lines(out.path()).iter().any(|line| line == BEGINNING_UNDER_CLUSTER));
    server.apply(&lease("node-1", "none")).unwrap();
    until("a node that opens nothing", SOON, || openings(out.path()) == [true]);
    server.apply(&lease("node-1", "ipip")).unwrap();
    until("a node that opens packets again", SOON, || openings(out.path()) == [true, false]);
    server.delete(Kind::Lease, "opening", "traffic-policy-opens-node-1");
    until("a node without a Lease", SOON, || openings(out.path()) == [true, false, true]);
    // No Lease says any more that agents run with --forwarding direct.
    server.delete(Kind::Lease, "opening", &format!("traffic-policy-opens-{SECOND}"));
    until("no Lease", SOON, || openings(out.path()) == [true, false, true, false]);
}

/// Errors and warnings that `lb` prints of these objects.
fn found_at_once(kubeconfig: &Path, arguments: &[&str]) -> Vec<String> {
    let mut command = Command::new(plugin::program().unwrap());
    command.args(["lb", "web", "--balancer", "gke", "--output", "json", "--kubeconfig"]).arg(kubeconfig);
    let printed = command.args(arguments).output().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&printed.stdout).unwrap();
    let findings = json["services"][0]["findings"].as_array().unwrap().iter();
    let text = |finding: &serde_json::Value, field: &str| finding[field].as_str().unwrap().to_owned();
    let mut lines: Vec<_> = findings
        .filter(|finding| finding["level"] != "note")
        .map(|finding| {
            let [level, code, what] = ["level", "code", "what"].map(|field| text(finding, field));
            format!("default/web: {level} {code}: {what}")
        })
        .collect();
    lines.sort();
    lines
}

/// The findings at the beginning are those of `lb`: with Leases, without any, and for a role that
/// may not read them.
#[tokio::test(flavor = "multi_thread")]
async fn it_begins_with_the_findings_of_lb() {
    const ANNOTATION: &str = "traffic-policy.io/forwarding: direct";
    /// An act beforehand, annotations, arguments, and whether a node opens nothing.
    type Case<'a> = (&'a dyn Fn(&ApiServer), &'a str, &'a [&'a str], bool);
    let refuse = |server: &ApiServer| server.refuse(Kind::Lease, 403);
    let give = |server: &ApiServer| server.apply(&lease(SECOND, "ipip")).unwrap();
    let nothing = |_: &ApiServer| {};
    let cases: [Case<'_>; 5] = [
        (&nothing, ANNOTATION, &[], true),
        (&refuse, ANNOTATION, &[], false),
        (&give, "", &[], true),
        (&give, "", &["--forwarding", "snat"], false),
        (&nothing, "", &["--forwarding", "tunnel", "--algorithm", "maglev"], true),
    ];
    for (prepare, annotations, arguments, closed) in cases {
        let server = ApiServer::start().unwrap();
        for text in [NODES, &under_cluster(annotations), &slice(&["node-1"])] {
            text.split("---\n").for_each(|object| server.apply(object).unwrap());
        }
        prepare(&server);
        let (access, out) = (tempfile::tempdir().unwrap(), tempfile::NamedTempFile::new().unwrap());
        let kubeconfig = access.path().join("kubeconfig");
        server.write_kubeconfig(&kubeconfig).unwrap();
        let wanted = found_at_once(&kubeconfig, arguments);
        let is_closed = wanted.iter().any(|line| line.starts_with(OPENS_NOTHING));
        assert_eq!(is_closed, closed, "{annotations} {arguments:?}: {wanted:#?}");
        let file = File::create(out.path()).unwrap();
        let mut command = watch();
        let mut running =
            Running::start(command.args(arguments).arg("--kubeconfig").arg(&kubeconfig).stdout(file));
        until("the first state", SOON, || !lines(out.path()).is_empty());
        running.signal(Signal::SIGTERM);
        assert_eq!(running.exit_code(), Some(0));
        let mut seen = lines(out.path()).split_off(1);
        seen.sort();
        assert_eq!(seen, wanted, "{annotations} {arguments:?}");
    }
}

#[test]
fn leases_of_a_folder_are_followed() {
    let (folder, out) = (folder(), tempfile::NamedTempFile::new().unwrap());
    write(folder.path(), "service.yaml", &under_cluster(""));
    let file = File::create(out.path()).unwrap();
    let _running = Running::start(watch().arg("--manifests").arg(folder.path()).stdout(file));
    until("the first state", SOON, || lines(out.path()).iter().any(|line| line == BEGINNING_UNDER_CLUSTER));
    let leases = |first: &str| format!("{}---\n{}", lease("node-1", first), lease(SECOND, "ipip"));
    write(folder.path(), "leases.yaml", &leases("none"));
    until("a node that opens nothing", SOON, || openings(out.path()) == [true]);
    write(folder.path(), "leases.yaml", &leases("ipip"));
    until("a node that opens packets", SOON, || openings(out.path()) == [true, false]);
    write(folder.path(), "leases.yaml", &lease(SECOND, "ipip"));
    until("a node without a Lease", SOON, || openings(out.path()) == [true, false, true]);
    // Without any Lease nobody knows who opens packets.
    fs::remove_file(folder.path().join("leases.yaml")).unwrap();
    until("no Lease", SOON, || openings(out.path()) == [true, false, true, false]);
}

#[test]
fn it_ends_when_nobody_reads_any_more() {
    let folder = folder();
    let mut running = Running::start(watch().arg("--manifests").arg(folder.path()).stdout(Stdio::piped()));
    let mut pipe = running.0.stdout.take().unwrap();
    let mut first = [0; 20];
    pipe.read_exact(&mut first).unwrap();
    drop(pipe);
    // The end is noticed without a change: nothing needs to be written.
    assert_eq!(running.exit_code(), Some(0));
}

/// A terminal, and all that was written to it.
struct Terminal {
    /// The terminal exists as long as this file is open.
    _main: File,
    written: Arc<Mutex<Vec<u8>>>,
}

impl Terminal {
    fn new(columns: u16, rows: u16) -> (Self, OwnedFd) {
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let OpenptyResult { master, slave } = openpty(Some(&size), None).unwrap();
        let main = File::from(master);
        let written = Arc::new(Mutex::new(Vec::new()));
        let (mut reader, all) = (main.try_clone().unwrap(), Arc::clone(&written));
        thread::spawn(move || {
            let mut part = [0; 4096];
            // Reads fail with EIO once no process has it open any more.
            while let Ok(length @ 1..) = reader.read(&mut part) {
                all.lock().unwrap().extend_from_slice(&part[..length]);
            }
        });
        (Self { _main: main, written }, slave)
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.written.lock().unwrap()).into_owned()
    }
}

/// The text without escape sequences.
fn plain(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('\x1b') {
        plain.push_str(&rest[..at]);
        let sequence = rest[at + 1..].strip_prefix('[').expect("a control sequence");
        let end = sequence.find(|c: char| c.is_ascii_alphabetic()).expect("its end");
        // A line begins where drawing starts anew, and on the alternate screen.
        if sequence.as_bytes()[end] == b'H' || sequence.starts_with("?1049") {
            plain.push('\n');
        }
        rest = &sequence[end + 1..];
    }
    plain + rest
}

#[test]
fn a_view_of_80_columns_that_leaves_the_terminal_as_it_was() {
    for (columns, rows, most) in [(80, 24, 80), (200, 50, 80), (60, 24, 60)] {
        let folder = folder();
        let (terminal, slave) = Terminal::new(columns, rows);
        let mut command = watch();
        command.arg("--manifests").arg(folder.path()).stdout(slave.try_clone().unwrap());
        command.stderr(slave);
        let mut running = Running::start(&mut command);
        // The copies of the terminal that a child inherits are closed with it.
        drop(command);
        until("the view", SOON, || terminal.text().contains("2 of 2 healthy"));
        write(folder.path(), "slice.yaml", &slice(&["node-1"]));
        until("the change in the view", SOON, || {
            let text = terminal.text();
            text.contains("1 of 2 healthy") && text.contains("turns unhealthy")
        });
        running.signal(Signal::SIGINT);
        assert_eq!(running.exit_code(), Some(0));
        until("the end of the view", SOON, || terminal.text().contains("\x1b[?1049l"));

        let text = terminal.text();
        let (entered, left) = (text.find("\x1b[?1049h").unwrap(), text.rfind("\x1b[?1049l").unwrap());
        assert!(entered < left, "the alternate screen is left");
        let (hidden, shown) = (text.rfind("\x1b[?25l").unwrap(), text.rfind("\x1b[?25h").unwrap());
        assert!(hidden < shown, "the cursor is shown again");
        until("the changes on the ordinary screen", SOON, || {
            terminal.text()[left..].contains("turns unhealthy")
        });
        let text = plain(&terminal.text());
        let longest = text.lines().map(|line| line.trim_end_matches('\r').chars().count()).max().unwrap();
        assert!(longest <= most, "{longest} columns of {most}:\n{text}");
        assert!(longest > most / 2, "the view is there: {text}");
    }
}
