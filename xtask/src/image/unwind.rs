//! libunwind for programs that are linked statically with musl: std needs one, and Debian has none
//! for musl.
//!
//! rustup's rust-src contains its sources, because rustc's own musl targets include it: it is
//! compiled here as rustc's bootstrap does.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use traffic_policy_toolchain as toolchain;

use crate::{cargo, files};

/// The sources other than `libunwind.cpp`, which is C++ and needs other flags.
const SOURCES: [&str; 5] = [
    "UnwindLevel1.c",
    "UnwindLevel1-gcc-ext.c",
    "Unwind-sjlj.c",
    "UnwindRegistersRestore.S",
    "UnwindRegistersSave.S",
];

/// A C compiler and how it finds musl's headers.
pub(super) struct Compiler {
    /// The prefix of the names of the GNU toolchain's programs.
    pub(super) gnu: &'static str,
    pub(super) headers: Vec<String>,
}

/// Creates `libunwind.a` in `folder`, unless it exists.
pub(super) fn library(sysroot: &Path, compiler: &Compiler, folder: &Path) -> Result<()> {
    let library = folder.join("libunwind.a");
    if library.exists() {
        return Ok(());
    }
    let sources = sysroot.join("lib/rustlib/src/rust/src/llvm-project/libunwind");
    ensure!(
        sources.join("src/libunwind.cpp").exists(),
        "the BPF toolchain's sources have no libunwind ({} is missing): install rustup's nightly with rust-src, or name a toolchain that has it by {}",
        sources.display(),
        toolchain::VARIABLE
    );
    files::make_folder(folder)?;
    let mut objects: Vec<PathBuf> = Vec::new();
    for source in SOURCES.into_iter().chain(["libunwind.cpp"]) {
        let object = folder.join(source).with_extension("o");
        let is_c_plus_plus = source.ends_with(".cpp");
        let name = if is_c_plus_plus { "g++" } else { "gcc" };
        let mut command = Command::new(format!("{}-{name}", compiler.gnu));
        command.args(["-c", "-O2", "-fPIC", "-funwind-tables", "-fvisibility=hidden", "-DNDEBUG"]);
        command.args(["-D_LIBUNWIND_IS_NATIVE_ONLY", "-U_FORTIFY_SOURCE"]);
        if is_c_plus_plus {
            command.args(["-std=c++17", "-nostdinc++", "-fno-exceptions", "-fno-rtti"]);
        } else {
            command.args(["-std=c99", "-D_GNU_SOURCE", "-fexceptions"]);
        }
        command.arg("-I").arg(sources.join("include")).args(&compiler.headers);
        command.arg(sources.join("src").join(source)).arg("-o").arg(&object);
        cargo::quietly(&mut command).with_context(|| format!("compiling libunwind's {source} failed"))?;
        objects.push(object);
    }
    // The letter D omits times and owners.
    let unfinished = folder.join("libunwind.unfinished");
    let mut command = Command::new(format!("{}-ar", compiler.gnu));
    cargo::quietly(command.arg("rcsD").arg(&unfinished).args(&objects))?;
    fs::rename(&unfinished, &library).with_context(|| format!("{} cannot be written", library.display()))
}
