//! The scripts of `testdata/model`: each describes one behaviour of Services, from manifests to the
//! desired state.

use std::{fs, path::Path};

use traffic_policy_testing::script;

#[test]
fn scripts() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/model");
    let mut paths: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "txtar"));
    paths.sort();
    assert!(paths.len() > 10, "the scripts are missing");
    let mut failures = Vec::new();
    for path in &paths {
        if let Err(error) = script::run(path) {
            failures.push(format!("{}: {error:#}", path.display()));
        }
    }
    assert!(
        failures.is_empty(),
        "{} of {} scripts failed\n{}",
        failures.len(),
        paths.len(),
        failures.join("\n")
    );
}
