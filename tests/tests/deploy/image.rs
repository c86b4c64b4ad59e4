//! The archive of `cargo xtask image`, loaded by container engines. Runs only if
//! TRAFFIC_POLICY_IMAGE names one, as `cargo xtask test image` sets it: building takes minutes.

use std::env;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use traffic_policy_testing::agent;
use traffic_policy_testing::container;
use traffic_policy_testing::image::{Image, architecture};
use traffic_policy_testing::pace::until;

const LIMIT: u64 = 25 * 1024 * 1024;
/// A Node and a Service without endpoints, for `explain`.
const MANIFEST: &str = "apiVersion: v1\nkind: Node\nmetadata: {name: node-1}\nstatus: {addresses: [{type: InternalIP, address: 172.18.0.13}]}\n---\napiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {type: NodePort, clusterIP: 10.96.0.1, externalTrafficPolicy: Local, ports: [{port: 80, nodePort: 30080}]}\n";

/// Prints that a test is skipped, to stderr directly: the test harness would capture it otherwise.
pub fn skipped(test: &str, why: &str) {
    writeln!(std::io::stderr(), "SKIPPED {test}: {why}").ok();
}

/// The path of the archive; without one, prints that the test is skipped.
pub fn archive(test: &str) -> Option<PathBuf> {
    let path = env::var_os("TRAFFIC_POLICY_IMAGE").map(PathBuf::from);
    if path.is_none() {
        skipped(test, "no image: `cargo xtask test image` builds it and runs this with it");
    }
    path
}

/// Whether a program is installed; otherwise prints that the test is skipped.
pub fn is_there(test: &str, program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        skipped(test, &format!("there is no {program}"));
    }
    found
}

fn said(output: Output) -> String {
    let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert!(output.status.success(), "{said}");
    said
}

#[test]
fn the_archive_is_what_it_says() {
    let Some(path) = archive("the_archive_is_what_it_says") else { return };
    assert!(fs::metadata(&path).unwrap().len() <= LIMIT);
    let image = Image::read(&path).unwrap();
    assert_eq!(image.name, concat!("localhost/traffic-policy:", env!("CARGO_PKG_VERSION")));
    for own in image.architectures() {
        let config = image.config(own).unwrap();
        assert_eq!(config["os"], "linux");
        let folder = tempfile::tempdir().unwrap();
        image.unpack(own, folder.path()).unwrap();
        let program = fs::read(folder.path().join("traffic-policy-agent")).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "{own}: more than the agent is in it");
        let elf = object::File::parse(&*program).unwrap();
        use object::{Object as _, ObjectSection as _};
        let interpreter = elf.sections().any(|section| section.name() == Ok(".interp"));
        assert!(!interpreter, "{own}: it is not static");
        // The program is position-independent, as its start files are.
        assert_eq!(elf.kind(), object::ObjectKind::Dynamic, "{own}");
        let machine =
            if own == "amd64" { object::Architecture::X86_64 } else { object::Architecture::Aarch64 };
        assert_eq!(elf.architecture(), machine);
        // Paths of the machine that built the program.
        let own_paths =
            [crate::root().display().to_string(), env::var("HOME").unwrap_or_default() + "/.cargo"];
        for path in own_paths {
            assert!(memchr::memmem::find(&program, path.as_bytes()).is_none(), "{own}: {path} is in it");
        }
    }
    assert!(image.architectures().contains(&architecture()), "not for this machine");
}

#[test]
fn the_list_of_its_parts_lies_beside() {
    let Some(path) = archive("the_list_of_its_parts_lies_beside") else { return };
    let list = fs::read(path.with_file_name("traffic-policy.spdx.json")).unwrap();
    let list: Value = serde_json::from_slice(&list).unwrap();
    assert_eq!(list["spdxVersion"], "SPDX-2.3");
    let packages = list["packages"].as_array().unwrap();
    let has = |name: &str| packages.iter().any(|package| package["name"] == name);
    for name in ["traffic-policy-agent", "aya", "aya-ebpf", "musl", "rust-std", "libunwind"] {
        assert!(has(name), "{name}");
    }
    assert!(!has("proptest") && !has("serde_derive"));
}

/// podman with folders of its own, without networks and cgroups.
fn podman(folder: &Path) -> Command {
    let mut command = Command::new("podman");
    command.arg("--root").arg(folder.join("root")).arg("--runroot").arg(folder.join("run"));
    command.args(["--storage-driver", "vfs", "--cgroup-manager", "cgroupfs"]);
    command.stdin(Stdio::null());
    container::only_cgroup2(&mut command).unwrap();
    command
}

#[test]
fn podman_loads_and_runs_it() {
    let Some(path) = archive("podman_loads_and_runs_it") else { return };
    if !is_there("podman_loads_and_runs_it", "podman") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let image = Image::read(&path).unwrap();
    let loaded = said(podman(folder.path()).args(["load", "--input"]).arg(&path).output().unwrap());
    assert!(loaded.contains(&image.name), "{loaded}");
    let manifests = folder.path().join("manifests");
    fs::create_dir(&manifests).unwrap();
    fs::write(manifests.join("web.yaml"), MANIFEST).unwrap();
    let run = |mounts: &[String], arguments: &[&str]| {
        let mut command = podman(folder.path());
        command.args([
            "run",
            "--rm",
            "--network",
            "none",
            "--cgroups",
            "disabled",
            // Otherwise podman requests higher limits than this machine may have.
            "--ulimit",
            "nofile=1024:1024",
            "--ulimit",
            "nproc=1024:1024",
            "--log-driver",
            "none",
        ]);
        command.args([
            "--read-only",
            "--cap-drop",
            "all",
            "--cap-add",
            "bpf,net_admin,perfmon,sys_admin,sys_ptrace",
        ]);
        command.args(mounts).arg(&image.name).args(arguments);
        command.output().unwrap()
    };
    let version = said(run(&[], &["--version"]));
    assert_eq!(version.trim(), concat!("traffic-policy-agent ", env!("CARGO_PKG_VERSION")));
    let mount = format!("--volume={}:/manifests:ro", manifests.display());
    let flow = ["192.0.2.10", "172.18.0.13:30080", "--manifests", "/manifests", "--node-name", "node-1"];
    let flow = [&["explain"], &flow[..]].concat();
    let explained = said(run(&[mount], &flow));
    assert!(explained.contains("rejected-no-endpoint"), "{explained}");
    // This container has no BPF file system, so there is an error; but all programs can be loaded.
    let checked = run(&[], &["check"]);
    let checked = String::from_utf8(checked.stdout).unwrap();
    assert!(checked.contains("the verifier of Linux"), "{checked}");
}

/// The program for another architecture starts where that architecture is emulated. The commands
/// load no BPF program: no user-mode emulator has bpf(2).
#[test]
fn programs_of_other_machines_start_emulated() {
    const NAME: &str = "programs_of_other_machines_start_emulated";
    let Some(path) = archive(NAME) else { return };
    let image = Image::read(&path).unwrap();
    let others: Vec<_> = image.architectures().into_iter().filter(|other| *other != architecture()).collect();
    if others.is_empty() {
        skipped(
            NAME,
            "the archive is for this machine alone: `cargo xtask image --arch all` makes the other",
        );
    }
    for other in others {
        let machine = if other == "amd64" { "x86_64" } else { "aarch64" };
        let emulators = [format!("qemu-{machine}-static"), format!("qemu-{machine}")];
        let there = |name: &&String| Command::new(name).arg("--version").output().is_ok();
        let Some(emulator) = emulators.iter().find(there) else {
            skipped(NAME, &format!("there is no {} (Debian's qemu-user-static)", emulators[0]));
            continue;
        };
        let folder = tempfile::tempdir().unwrap();
        image.unpack(other, folder.path()).unwrap();
        let manifests = folder.path().join("manifests");
        fs::create_dir(&manifests).unwrap();
        fs::write(manifests.join("web.yaml"), MANIFEST).unwrap();
        let run = |arguments: &[&str]| {
            let mut command = Command::new(emulator);
            command.arg(folder.path().join("traffic-policy-agent")).args(arguments);
            command.output().unwrap()
        };
        let version = said(run(&["--version"]));
        assert_eq!(version.trim(), concat!("traffic-policy-agent ", env!("CARGO_PKG_VERSION")), "{other}");
        // It parses and prints as on any machine.
        let script = said(run(&["completion", "bash"]));
        let own =
            said(Command::new(agent::program().unwrap()).args(["completion", "bash"]).output().unwrap());
        assert_eq!(script, own, "{other}");
        let manifests = manifests.to_str().unwrap();
        let checked = run(&["check", "--node-name", "node-1", "--manifests", manifests, "--output", "json"]);
        assert!(serde_json::from_slice::<Value>(&checked.stdout).is_ok(), "{other}: {checked:?}");
        let refused = run(&["lb"]);
        assert_eq!(refused.status.code(), Some(2), "{other}: {refused:?}");
    }
}

/// Builds the last stage of the real file, without a network. The first stage, which compiles, is
/// replaced by a folder with its result: the program of the archive.
#[test]
fn the_containerfile_makes_the_same_image() {
    const NAME: &str = "the_containerfile_makes_the_same_image";
    let Some(path) = archive(NAME) else { return };
    if !is_there(NAME, "podman") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let image = Image::read(&path).unwrap();
    let [stage, context] = ["stage", "context"].map(|name| folder.path().join(name));
    fs::create_dir(&context).unwrap();
    image.unpack(architecture(), &stage).unwrap();
    let mut build = podman(folder.path());
    // Another isolation would require cgroups and namespaces for nothing: no command is run.
    build.args(["build", "--isolation", "chroot", "--identity-label=false", "--tag", "localhost/built:1"]);
    build.arg(format!("--build-context=build={}", stage.display()));
    build.arg("--file").arg(crate::root().join("deploy/Containerfile")).arg(&context);
    said(build.output().unwrap());
    let inspected = podman(folder.path()).args(["image", "inspect", "localhost/built:1"]).output().unwrap();
    let inspected: Value = serde_json::from_str(&said(inspected)).unwrap();
    let mut built = inspected[0]["Config"].as_object().unwrap().clone();
    // Engines add it to every image.
    let environment = built.remove("Env").unwrap_or_default();
    assert!(
        environment
            .as_array()
            .is_none_or(|all| all.iter().all(|one| one.as_str().unwrap().starts_with("PATH=")))
    );
    assert_eq!(Value::Object(built), image.config(architecture()).unwrap()["config"]);
    assert_eq!(inspected[0]["RootFS"]["Layers"].as_array().unwrap().len(), 1);
    let mounted = said(podman(folder.path()).args(["image", "mount", "localhost/built:1"]).output().unwrap());
    // With this driver it is a folder, not a mount.
    let mounted = Path::new(mounted.trim());
    assert_eq!(fs::read_dir(mounted).unwrap().count(), 1, "more than the agent is in it");
    let program = "traffic-policy-agent";
    assert!(fs::read(mounted.join(program)).unwrap() == fs::read(stage.join(program)).unwrap());
    assert_eq!(fs::metadata(mounted.join(program)).unwrap().permissions().mode() & 0o777, 0o755);
}

/// containerd with folders of its own; it is stopped when dropped.
struct Containerd {
    process: Child,
    folder: tempfile::TempDir,
}

impl Containerd {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let config = format!(
            "version = 2\nroot = '{}'\nstate = '{}'\ndisabled_plugins = ['io.containerd.grpc.v1.cri']\n[grpc]\naddress = '{}'\n",
            path("root"),
            path("state"),
            path("socket")
        );
        fs::write(path("config.toml"), config).unwrap();
        let log = fs::File::create(path("log")).unwrap();
        let process = Command::new("containerd")
            .args(["--config", &path("config.toml")])
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let started = Self { process, folder };
        until("containerd answers", Duration::from_secs(20), || {
            started.ctr().arg("version").output().is_ok_and(|output| output.status.success())
        });
        started
    }

    fn ctr(&self) -> Command {
        let mut command = Command::new("ctr");
        command.arg("--address").arg(self.folder.path().join("socket")).args(["--namespace", "k8s.io"]);
        command
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

/// The import is done as `kind load image-archive` does it on each node.
#[test]
fn containerd_imports_it_by_its_name() {
    let Some(path) = archive("containerd_imports_it_by_its_name") else { return };
    if !is_there("containerd_imports_it_by_its_name", "containerd")
        || !is_there("containerd_imports_it_by_its_name", "ctr")
    {
        return;
    }
    let containerd = Containerd::start();
    let mut import = containerd.ctr();
    import.args(["images", "import", "--all-platforms", "--digests", "--snapshotter", "native"]).arg(&path);
    said(import.output().unwrap());
    let image = Image::read(&path).unwrap();
    let listed = said(containerd.ctr().args(["images", "list"]).output().unwrap());
    let line =
        listed.lines().find(|line| line.starts_with(&image.name)).unwrap_or_else(|| panic!("{listed}"));
    for own in image.architectures() {
        assert!(line.contains(&format!("linux/{own}")), "{line}");
    }
}
