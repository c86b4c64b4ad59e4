//! Compiles the packet path for BPF and writes the object to `OUT_DIR`, for `dataplane::object`.
//!
//! Without a BPF toolchain the library is built without the object, so that everything that loads
//! no program can still be built and tested. The agent then fails to build, with a message that
//! gives the remedy.

use std::{env, fs, path::Path};

use anyhow::Context;
use aya_build::{Package, Toolchain};
use object::build::elf;
use traffic_policy_toolchain as toolchain;

fn main() -> anyhow::Result<()> {
    println!("cargo:rerun-if-env-changed={}", toolchain::VARIABLE);
    println!("cargo:rustc-check-cfg=cfg(bpf_object)");
    // `PATH` itself is not tracked: it differs between a shell and a cargo started by cargo, and
    // each change would recompile everything. `xtask setup` reports tools that are found or
    // replaced later.
    let Some(found) = toolchain::find().filter(|_| toolchain::linker_found()) else { return Ok(()) };
    // Clippy, for which a build script runs once more, runs no program: an empty object will do.
    let is_clippy = |wrapper| Path::new(&wrapper).file_stem().is_some_and(|name| name == "clippy-driver");
    if env::var_os("RUSTC_WORKSPACE_WRAPPER").is_some_and(is_clippy) {
        let folder = env::var_os("OUT_DIR").context("cargo sets OUT_DIR")?;
        fs::write(Path::new(&folder).join("traffic-policy-ebpf"), [])?;
        println!("cargo:rustc-cfg=bpf_object");
        return Ok(());
    }
    // `-Z build-std` on a stable compiler needs the first. The second, set by users and by CI
    // services, cuts the programs into codegen units, some of which the verifier refuses. SAFETY:
    // this program has one thread.
    unsafe {
        env::set_var("RUSTC_BOOTSTRAP", "1");
        env::remove_var("CARGO_INCREMENTAL");
    }
    let features: &[&str] = if env::var_os("CARGO_FEATURE_LOG").is_some() { &["log"] } else { &[] };
    aya_build::build_ebpf(
        [Package {
            name: "traffic-policy-ebpf",
            root_dir: concat!(env!("CARGO_MANIFEST_DIR"), "/../../traffic-policy-ebpf"),
            features,
            ..Default::default()
        }],
        Toolchain::Custom(&found.name),
    )?;
    let folder = env::var_os("OUT_DIR").context("cargo sets OUT_DIR")?;
    remove_debug_information(&Path::new(&folder).join("traffic-policy-ebpf"))?;
    println!("cargo:rustc-cfg=bpf_object");
    Ok(())
}

/// Removes the sections that only a debugger reads: three quarters of the object. The kernel's
/// types and lines are in `.BTF` and `.BTF.ext`, which bpf-linker makes of the same information.
fn remove_debug_information(object: &Path) -> anyhow::Result<()> {
    let whole = fs::read(object)?;
    let mut file = elf::Builder::read(&*whole).context("the compiled packet path is damaged")?;
    for section in &mut file.sections {
        let name = section.name.to_string();
        section.delete = name.starts_with(".debug") || name.starts_with(".rel.debug");
    }
    file.delete_orphan_symbols();
    // LLVM keeps the names of sections among those of symbols, which `Builder` does not write.
    let names = file.sections.add();
    names.name = ".shstrtab".into();
    names.sh_type = object::elf::SHT_STRTAB;
    names.data = elf::SectionData::SectionString;
    let mut rest = Vec::new();
    file.write(&mut rest)?;
    Ok(fs::write(object, rest)?)
}
