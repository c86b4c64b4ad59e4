//! Compiles the BPF programs with which the bench measures, and leaves the object in `OUT_DIR`, for
//! `object`.
//!
//! Without a BPF toolchain the bench is built all the same, and reports what is missing when it is
//! run.

use std::{env, fs, path::Path};

use anyhow::Context;
use aya_build::{Package, Toolchain};
use traffic_policy_toolchain as toolchain;

fn main() -> anyhow::Result<()> {
    println!("cargo:rerun-if-env-changed={}", toolchain::VARIABLE);
    // The floor's maps have the layouts of the packet path.
    println!(
        "cargo:rerun-if-changed={}",
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../traffic-policy-ebpf/src")
    );
    println!("cargo:rustc-check-cfg=cfg(bpf_object)");
    let Some(found) = toolchain::find().filter(|_| toolchain::linker_found()) else { return Ok(()) };
    // Clippy, for which a build script runs once more, runs no program: an empty object will do.
    let is_clippy = |wrapper| Path::new(&wrapper).file_stem().is_some_and(|name| name == "clippy-driver");
    if env::var_os("RUSTC_WORKSPACE_WRAPPER").is_some_and(is_clippy) {
        let folder = env::var_os("OUT_DIR").context("cargo sets OUT_DIR")?;
        fs::write(Path::new(&folder).join("traffic-policy-bench"), [])?;
        println!("cargo:rustc-cfg=bpf_object");
        return Ok(());
    }
    // As for the packet path. SAFETY: this program has one thread.
    unsafe {
        env::set_var("RUSTC_BOOTSTRAP", "1");
        env::remove_var("CARGO_INCREMENTAL");
    }
    aya_build::build_ebpf(
        [Package {
            name: "traffic-policy-bench-ebpf",
            root_dir: concat!(env!("CARGO_MANIFEST_DIR"), "/ebpf"),
            ..Default::default()
        }],
        Toolchain::Custom(&found.name),
    )?;
    println!("cargo:rustc-cfg=bpf_object");
    Ok(())
}
