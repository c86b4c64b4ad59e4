use super::{
    super::{
        apt::{Apt, Compiler},
        facts::Linker,
    },
    *,
};
use crate::target;

fn toolchain(llvm: u32) -> Toolchain {
    Toolchain { name: "/usr".to_owned(), llvm }
}

fn linker(llvm: Option<u32>) -> Option<Linker> {
    Some(Linker { version: LINKER.to_owned(), llvm })
}

/// Returns the facts of a Debian with only rustup's stable.
fn debian() -> Facts {
    let compiler = Compiler {
        packages: ["rustc-web", "cargo-web", "rust-web-src"].map(str::to_owned),
        version: (1, 96),
    };
    Facts {
        rustup: Some(false),
        root_or_sudo: true,
        apt: Some(Apt { compiler: Some(compiler), llvm: true }),
        ..Facts::default()
    }
}

fn install(packages: &[&str]) -> Step {
    Step::AptInstall(packages.iter().map(|name| (*name).to_owned()).collect())
}

const LIBRARIES: [&str; 5] = ["llvm-22-dev", "libpolly-22-dev", "zlib1g-dev", "libzstd-dev", "libxml2-dev"];

/// Takes the next step, which must be `step`.
fn take(facts: &mut Facts, step: Step) {
    assert_eq!(next(facts), Next::Step(step.clone()));
    facts.tried.push(step);
}

#[test]
fn nothing_missing() {
    let facts = Facts { toolchain: Some(toolchain(22)), linker: linker(Some(22)), ..Facts::default() };
    assert_eq!(next(&facts), Next::Done);
    let own_llvm = Facts { linker: linker(None), ..facts };
    assert_eq!(next(&own_llvm), Next::Done);
}

#[test]
fn where_rustup_has_no_nightly_the_distribution_serves() {
    let mut facts = debian();
    take(&mut facts, Step::Nightly);
    take(&mut facts, Step::AptUpdate);
    take(&mut facts, install(&["rustc-web", "cargo-web", "rust-web-src"]));
    facts.toolchain = Some(toolchain(22));
    take(&mut facts, install(&LIBRARIES));
    take(&mut facts, Step::Linker(22));
    facts.linker = linker(Some(22));
    assert_eq!(next(&facts), Next::Done);
}

#[test]
fn a_nightly_gets_its_sources() {
    let mut facts = Facts { rustup: Some(true), ..debian() };
    take(&mut facts, Step::NightlySources);
    facts.toolchain = Some(toolchain(22));
    take(&mut facts, Step::AptUpdate);
    take(&mut facts, install(&LIBRARIES));
    take(&mut facts, Step::Linker(22));
}

#[test]
fn a_linker_of_another_llvm_is_replaced() {
    let mut facts = Facts { toolchain: Some(toolchain(22)), linker: linker(Some(21)), ..debian() };
    take(&mut facts, Step::AptUpdate);
    take(&mut facts, install(&LIBRARIES));
    take(&mut facts, Step::Linker(22));
}

#[test]
fn programs_of_tests_are_installed() {
    let mut facts = Facts {
        toolchain: Some(toolchain(22)),
        linker: linker(Some(22)),
        programs_missing: vec!["openssl"],
        ..debian()
    };
    take(&mut facts, Step::AptUpdate);
    take(&mut facts, install(&["openssl"]));
    let Next::Impossible(why) = next(&facts) else { panic!("it is still missing") };
    assert!(why.contains("openssl"), "{why}");
}

#[test]
fn components_come_from_rustup() {
    let mut facts = Facts {
        toolchain: Some(toolchain(22)),
        linker: linker(Some(22)),
        components_missing: vec!["clippy"],
        ..debian()
    };
    take(&mut facts, Step::Components(vec!["clippy"]));
    facts.components_missing.clear();
    assert_eq!(next(&facts), Next::Done);
}

/// The message names what to install if there is neither apt nor rustup, and no step is tried
/// twice.
#[test]
fn elsewhere_it_says_what_to_install() {
    let mut facts = Facts { apt: None, ..debian() };
    take(&mut facts, Step::Nightly);
    let Next::Impossible(why) = next(&facts) else { panic!("nothing is left to try") };
    assert!(why.contains("rust-src"), "{why}");
    facts.toolchain = Some(toolchain(22));
    let Next::Impossible(why) = next(&facts) else { panic!("no linker can be installed") };
    assert!(why.contains("--features llvm-22"), "{why}");
}

#[test]
fn an_llvm_that_the_linker_does_not_know() {
    let mut facts = Facts { toolchain: Some(toolchain(24)), ..debian() };
    take(&mut facts, Step::AptUpdate);
    let Next::Impossible(why) = next(&facts) else { panic!("no linker for LLVM 24") };
    assert!(why.contains("21 to 23") && why.contains(VARIABLE), "{why}");
}

#[test]
fn a_named_toolchain_is_not_replaced() {
    let facts = Facts { named: Some("mine".to_owned()), tried: vec![Step::AptUpdate], ..debian() };
    let Next::Impossible(why) = next(&facts) else { panic!("the named one is missing") };
    assert!(why.contains("names mine"), "{why}");
}

#[test]
fn without_privileges_it_says_so() {
    let facts = Facts { root_or_sudo: false, toolchain: Some(toolchain(22)), ..debian() };
    let Next::Impossible(why) = next(&facts) else { panic!("apt needs root") };
    assert!(why.contains("as root"), "{why}");
}

/// Returns the facts of a machine that can build for itself and has to build for the other target.
fn crossing() -> Facts {
    let target = target::named("aarch64-unknown-linux-gnu").unwrap();
    let cross = Cross { target, standard_library: false, compiler: false };
    Facts { toolchain: Some(toolchain(22)), linker: linker(Some(22)), cross: Some(cross), ..debian() }
}

/// Sets the tools that `facts` has for the target.
fn there(facts: &mut Facts, standard_library: bool, compiler: bool) {
    let cross = facts.cross.as_mut().unwrap();
    (cross.standard_library, cross.compiler) = (standard_library, compiler);
}

#[test]
fn another_target_gets_its_standard_library_and_compiler() {
    let mut facts = crossing();
    let library = Step::StandardLibrary("aarch64-unknown-linux-gnu");
    assert!(!library.concerns_bpf(), "what was compiled for BPF stays good");
    take(&mut facts, library);
    there(&mut facts, true, false);
    take(&mut facts, Step::AptUpdate);
    take(&mut facts, install(&["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"]));
    there(&mut facts, true, true);
    assert_eq!(next(&facts), Next::Done);
}

#[test]
fn without_rustup_and_apt_it_says_what_another_target_takes() {
    let facts = Facts { rustup: None, apt: None, ..crossing() };
    let Next::Impossible(why) = next(&facts) else { panic!("nothing can be installed") };
    for word in [
        "rustup target add aarch64-unknown-linux-gnu",
        "libstd-rust-dev:arm64",
        "gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
        "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER",
        "CC_aarch64_unknown_linux_gnu",
    ] {
        assert!(why.contains(word), "{word} is not in: {why}");
    }
}

/// If the packages do not help (a distribution without them), setup stops and reports that.
#[test]
fn a_compiler_that_apt_does_not_bring() {
    let mut facts = crossing();
    there(&mut facts, true, false);
    take(&mut facts, Step::AptUpdate);
    take(&mut facts, install(&["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"]));
    let Next::Impossible(why) = next(&facts) else { panic!("the compiler is still missing") };
    assert!(why.contains("a C compiler for") && !why.contains("standard library"), "{why}");
}
