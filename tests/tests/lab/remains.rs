//! No part of a lab remains, whatever ends its process.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use traffic_policy_testing::lab::{Lab, persistent};
use traffic_policy_testing::netns::{Namespace, is_running};
use traffic_policy_testing::pace::scaled;

fn remains(id: &str) -> Vec<String> {
    let mut found = Namespace::names(&format!("{id}-"));
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    found.extend(mounts.lines().filter(|line| line.contains(&format!("{id}/"))).map(str::to_owned));
    let folder = Path::new("/run/traffic-policy-lab").join(id);
    found.extend(folder.exists().then(|| folder.display().to_string()));
    found
}

#[test]
fn a_lab_comes_up_fast_and_goes_completely() {
    let start = Instant::now();
    let lab = Lab::builder().nodes(3).pods_per_node(2).build().unwrap();
    let up = start.elapsed();
    let id = lab.id().to_owned();
    assert_eq!(Namespace::names(&format!("{id}-")).len(), 2 + 3 + 6);
    assert!(!remains(&id).is_empty());
    let start = Instant::now();
    drop(lab);
    println!("up in {up:?}, down in {:?}", start.elapsed());
    assert_eq!(remains(&id), Vec::<String>::new());
    assert!(up < scaled(Duration::from_millis(1500)), "{up:?}");
}

#[test]
fn a_process_in_a_lab_dies_with_its_owner() {
    let lab = Lab::builder().nodes(1).build().unwrap();
    let mut command = Command::new("sleep");
    command.arg("100");
    let process = lab.node(1).netns().spawn(command).unwrap();
    let inside = format!("/proc/{}", process.id());
    let theirs = fs::read_link(format!("{inside}/ns/net")).unwrap();
    assert_ne!(theirs, fs::read_link("/proc/self/ns/net").unwrap());
    drop(process);
    assert!(!Path::new(&inside).exists());
}

/// Runs one of the tests below in another process of this test program, and waits for the name of
/// its lab.
fn child(test: &str) -> (Child, String) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([&format!("remains::{test}"), "--exact", "--ignored", "--nocapture"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let id = lines.map_while(Result::ok).find_map(|line| line.strip_prefix("lab ").map(str::to_owned));
    let Some(id) = id else {
        let mut errors = String::new();
        child.stderr.as_mut().unwrap().read_to_string(&mut errors).unwrap();
        panic!("the child made no lab: {errors}");
    };
    (child, id)
}

#[test]
#[ignore = "panics on purpose; started by the test below"]
fn panics() {
    let lab = Lab::builder().nodes(2).overlay().build().unwrap();
    println!("\nlab {}", lab.id());
    panic!("on purpose");
}

#[test]
fn nothing_remains_after_a_panic() {
    let (mut child, id) = child("panics");
    let status = child.wait().unwrap();
    assert!(!status.success());
    assert_eq!(remains(&id), Vec::<String>::new());
}

#[test]
#[ignore = "waits to be killed; started by the test below"]
fn waits() {
    let lab = Lab::builder().nodes(2).build().unwrap();
    let mut command = Command::new("sleep");
    command.arg("100");
    let process = lab.node(1).netns().spawn(command).unwrap();
    println!("\nprocess {}", process.id());
    println!("lab {}", lab.id());
    std::thread::sleep(Duration::from_secs(100));
}

#[test]
fn the_next_lab_removes_what_a_killed_one_left() {
    let (mut child, id) = child("waits");
    assert!(!remains(&id).is_empty());
    child.kill().unwrap();
    child.wait().unwrap();
    drop(Lab::builder().nodes(1).build().unwrap());
    assert_eq!(remains(&id), Vec::<String>::new());
}

#[test]
fn a_lab_of_people_stays_until_it_is_taken_down() {
    let name = format!("test{}", std::process::id());
    let lab = Lab::builder().nodes(1).persistent(&name).build().unwrap();
    let id = lab.id().to_owned();
    let mut command = Command::new("sleep");
    command.arg("100");
    let process = lab.node(1).netns().spawn_detached(command).unwrap();
    persistent::keep(lab, &[process]).unwrap();
    assert!(Lab::builder().nodes(1).persistent(&name).build().is_err(), "made twice");
    assert!(persistent::list().contains(&name));
    assert!(persistent::drawing(&name).unwrap().contains("pod-1-1"));
    persistent::namespace(&name, "pod-1-1")
        .unwrap()
        .ping("10.244.1.1".parse().unwrap(), scaled(Duration::from_secs(1)))
        .unwrap();
    persistent::down(&name).unwrap();
    assert_eq!(remains(&id), Vec::<String>::new());
    assert!(!is_running(process));
}
