fn main() {
    // bpf-linker hands LLVM `--bpf-expand-memcpy-in-order`, which turns inline expansion off: each
    // zeroed struct then becomes a call of a loop that writes byte by byte (50 ns on a new flow).
    // aya-build overwrites RUSTFLAGS, so the flag can be passed from here only.
    if std::env::var("CARGO_CFG_TARGET_ARCH").as_deref() == Ok("bpf") {
        println!("cargo:rustc-link-arg-bins=--disable-expand-memcpy-in-order");
    }
    println!("cargo:rerun-if-changed=build.rs");
}
