//! Tells the bench where the agent's build script has left the programs that it measures against.

fn main() {
    let folder = std::env::var("DEP_TRAFFIC_POLICY_PROGRAMS_FOLDER").unwrap_or_default();
    println!("cargo:rustc-env=TRAFFIC_POLICY_PROGRAMS={folder}");
    println!("cargo:rerun-if-changed=build.rs");
}
