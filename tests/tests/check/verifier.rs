//! Programs that the verifier refuses: `check` names the cause before the first start, and `run`
//! exits with the same message.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use memchr::memmem;
use object::{Object, ObjectSection, ObjectSymbol};
use traffic_policy_dataplane::object_bytes;
use traffic_policy_testing::agent::{self, Agent};
use traffic_policy_testing::attached::Attached;
use traffic_policy_testing::lab::Lab;

use crate::output::{CheckOutput, one_node};

/// A copy of the agent in whose packet path these programs begin with a read of an uninitialised
/// register.
fn damaged(folder: &Path, programs: &[&str]) -> PathBuf {
    // r0 = r9
    const UNREADABLE: [u8; 8] = [0xbf, 0x90, 0, 0, 0, 0, 0, 0];
    let object = object_bytes();
    let file = object::File::parse(object).unwrap();
    let mut agent = fs::read(agent::program().unwrap()).unwrap();
    let place = memmem::find(&agent, object).expect("this agent has another packet path");
    for program in programs {
        let symbol = file.symbols().find(|symbol| symbol.name() == Ok(program)).unwrap();
        let section = file.section_by_index(symbol.section_index().unwrap()).unwrap();
        let at = place + (section.file_range().unwrap().0 + symbol.address()) as usize;
        agent[at..at + UNREADABLE.len()].copy_from_slice(&UNREADABLE);
    }
    let path = folder.join("damaged");
    fs::write(&path, agent).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn what_the_verifier_refuses() {
    let lab = one_node(Lab::builder());
    let folder = lab.logs();
    let damaged = damaged(&folder, &["tp_xdp_icmp6", "tp_tc_slow4"]);
    let log = folder.join("traffic-policy-verifier-tp_tc_slow4.log");
    let refused = |number, all| {
        format!(
            "refuses {number} of the packet path's {all} programs; the first is tp_tc_slow4, of which the kernel's verifier says: R9 !read_ok (its whole log is in {})",
            log.display()
        )
    };

    let pins = lab.bpffs().join("node-1");
    let mut command = Command::new(&damaged);
    command.args(["check", "--output", "json", "--pin-dir"]).arg(&pins).env_clear().env("TMPDIR", &folder);
    let output = lab.node(1).netns().output(command).unwrap();
    let checked = CheckOutput::of(&output);
    // Before Linux 6.6 there is a note about TC programs, too.
    checked.has("error", "programs", &refused(2, 78), "boot a kernel of the table in ");
    assert_eq!(checked.code, Some(1));
    let whole = fs::read_to_string(&log).unwrap();
    assert!(whole.contains("R9 !read_ok") && whole.contains("processed"), "{whole}");
    assert_eq!(fs::metadata(&log).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(!pins.exists(), "check pins nothing");

    let builder = Agent::builder(&lab, lab.node(1)).program(&damaged);
    let mut agent = builder.environment("TMPDIR", &folder.display().to_string()).start().unwrap();
    assert_eq!(agent.wait_ended(Duration::from_secs(20)).unwrap(), Some(1));
    // This agent attaches to TC alone, and to no cgroup: it loads neither what only XDP jumps to,
    // nor the programs of SCTP, of sockets, of devices without Ethernet, nor those that open
    // packets of other nodes.
    let refused = refused(1, 24);
    let log = agent.log();
    let last = log.lines().last().unwrap_or_default();
    assert!(last.starts_with("traffic-policy-agent: Linux ") && last.contains(&refused), "{log}");
    assert!(last.contains("boot a kernel of the table in "), "{log}");
    assert!(!log.contains("processed"), "the verifier's log is in its file\n{log}");
    assert_eq!(lab.node(1).netns().attached("eth0").unwrap(), Attached::default());
    assert!(!pins.exists(), "a start that fails leaves nothing");
}
