//! One node of a lab whose agent is a service of the machine's systemd.

use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{env, fs};

use traffic_policy_testing::agent;
use traffic_policy_testing::cgroup::Cgroup;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::Lab;
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::pace::wait_for;

/// A variable that is set in machines whose systemd tests may control.
const VARIABLE: &str = "TRAFFIC_POLICY_SYSTEMD";
const PAGE: &str = include_str!("../../../docs/operating.md");
const UNIT: &str = include_str!("../../../deploy/systemd/traffic-policy-agent.service");
const NAME: &str = "traffic-policy-agent";
const PROGRAM: &str = "/usr/local/bin/traffic-policy-agent";
const SETTINGS: &str = "/etc/default/traffic-policy-agent";
const PINS: &str = "/sys/fs/bpf/traffic-policy";
const DROP_IN: &str = "/run/systemd/system/traffic-policy-agent.service.d";
const LOG: &str = "/run/traffic-policy-agent.log";
pub const PORT: u16 = 30080;
pub const CLUSTER_IP: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 96, 0, 80)), 80);

/// The unit has one name, and so has the folder of its pins.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The service, stopped and removed when dropped.
pub struct Installed {
    pub cluster: Cluster,
    /// The cgroup of the processes whose connections are served.
    cgroup: Cgroup,
    _alone: MutexGuard<'static, ()>,
}

impl Installed {
    /// Installs the service as docs/operating.md describes, and does not start it. Returns `None`,
    /// with a printed message, where tests may not use systemd.
    ///
    /// The node is a namespace of the lab, which `nsenter` enters before the agent is executed;
    /// `settings` are further lines of the file in /etc/default.
    pub fn new(test: &str, settings: &[&str]) -> Option<Self> {
        if env::var_os(VARIABLE).is_none() {
            let skipped = format!("SKIPPED {test}: needs the systemd of `cargo xtask vm test systemd`\n");
            // Written to stderr directly: the test harness would capture it otherwise.
            std::io::stderr().write_all(skipped.as_bytes()).unwrap();
            return None;
        }
        let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
        let service = Cluster::node_port("web", Policy::Cluster, PORT)
            .cluster_ip(CLUSTER_IP.ip())
            .cluster_ip("fd00:96::80".parse().unwrap());
        cluster.manifests.apply(&service, &cluster.backends()).unwrap();
        let cgroup = Cgroup::create("service").unwrap();
        let installed = Self { cluster, cgroup, _alone: alone };
        installed.install(settings);
        Some(installed)
    }

    fn install(&self, settings: &[&str]) {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("deploy/systemd")).unwrap();
        fs::write(folder.path().join("deploy/systemd/traffic-policy-agent.service"), UNIT).unwrap();
        fs::copy(agent::program().unwrap(), folder.path().join(NAME)).unwrap();
        fs::create_dir_all("/etc/default").unwrap();
        fs::create_dir_all("/usr/local/bin").unwrap();
        for command in self.commands().iter().filter(|command| !command.starts_with("systemctl")) {
            let done = Command::new("sh").args(["-ec", command]).current_dir(folder.path()).status().unwrap();
            assert!(done.success(), "{command}: {done}");
        }
        // These lines replace the API server in the page's file.
        let node = self.cluster.lab.node(1);
        let mut text = format!(
            "TRAFFIC_POLICY_NODE_NAME={}\nTRAFFIC_POLICY_DEVICE=eth0\nTRAFFIC_POLICY_MANIFESTS={}\nTRAFFIC_POLICY_CGROUP={}\n",
            node.name,
            self.cluster.manifests.folder().display(),
            self.cgroup.path().display()
        );
        settings.iter().for_each(|line| text += &format!("{line}\n"));
        assert!(fs::read_to_string(SETTINGS).unwrap().starts_with("TRAFFIC_POLICY_KUBECONFIG="));
        fs::write(SETTINGS, text).unwrap();
        fs::create_dir_all(DROP_IN).unwrap();
        let start = format!(
            "[Service]\nExecStart=\nExecStart=nsenter --net={} {PROGRAM} run\nStandardError=append:{LOG}\nStandardOutput=append:{LOG}\n",
            node.netns().path().display()
        );
        fs::write(Path::new(DROP_IN).join("lab.conf"), start).unwrap();
        fs::write(LOG, "").unwrap();
        assert!(systemctl(&["daemon-reload"]).status.success());
    }

    /// The commands in the page's part about systemd.
    fn commands(&self) -> Vec<&'static str> {
        let (_, part) = PAGE.split_once("## As a service of systemd").unwrap();
        let (_, block) = part.split_once("```console\n").unwrap();
        let (block, _) = block.split_once("```").unwrap();
        let commands: Vec<_> = block.lines().filter_map(|line| line.strip_prefix("# ")).collect();
        assert_eq!(commands.len(), 4, "{block}");
        commands
    }

    /// Enables and starts the service by the page's last command, which waits until it is ready.
    pub fn start(&self) {
        let command = *self.commands().last().unwrap();
        let words: Vec<_> = command.split(' ').collect();
        assert_eq!(words, ["systemctl", "enable", "--now", NAME]);
        let output = systemctl(&words[1..]);
        assert!(output.status.success(), "{}\n{}", String::from_utf8_lossy(&output.stderr), self.log());
    }

    pub fn property(&self, name: &str) -> String {
        let output = systemctl(&["show", "--property", name, "--value", NAME]);
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    pub fn pid(&self) -> u32 {
        self.property("MainPID").parse().unwrap()
    }

    /// Waits until a property has a wanted value, and returns it.
    pub fn wait(&self, property: &str, limit: Duration, wanted: impl Fn(&str) -> bool) -> String {
        wait_for(property, limit, || Some(self.property(property)).filter(|value| wanted(value)))
    }

    /// Whether a process of the node, in the served cgroup, can connect to an address.
    pub fn connects(&self, to: SocketAddr) -> bool {
        let script = format!(
            "echo $$ >{}/cgroup.procs && exec 3<>/dev/tcp/{}/{}",
            self.cgroup.path().display(),
            to.ip(),
            to.port()
        );
        let mut command = Command::new("bash");
        command.args(["-c", &script]);
        self.cluster.lab.node(1).netns().output(command).unwrap().status.success()
    }

    /// All output of the agent.
    pub fn log(&self) -> String {
        fs::read_to_string(LOG).unwrap_or_default()
    }
}

impl Drop for Installed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let status = systemctl(&["status", "--no-pager", "--full", NAME]);
            eprintln!("--- systemd says:\n{}", String::from_utf8_lossy(&status.stdout));
            eprintln!("--- the agent said:\n{}---", self.log());
        }
        systemctl(&["disable", "--now", NAME]);
        systemctl(&["reset-failed", NAME]);
        let netns = self.cluster.lab.node(1).netns();
        let mut cleanup = Command::new(PROGRAM);
        cleanup.args(["cleanup", "--pin-dir", PINS]);
        let cleaned = netns.output(cleanup);
        if let Err(error) = cleaned {
            eprintln!("cleanup: {error:#}");
        }
    }
}

pub fn systemctl(arguments: &[&str]) -> Output {
    Command::new("systemctl").args(arguments).output().unwrap()
}
