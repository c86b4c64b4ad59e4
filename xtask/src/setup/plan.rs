//! The next step of the set-up, from the facts. Pure.

use traffic_policy_toolchain::{Toolchain, VARIABLE};

use super::{
    apt::OLDEST_RUSTC,
    facts::{Cross, Facts},
    step::{LINKER, Step},
};

/// LLVM versions that bpf-linker can be compiled for.
const LINKER_LLVM: std::ops::RangeInclusive<u32> = 21..=23;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Done,
    Step(Step),
    Impossible(String),
}

/// Returns the next step towards everything that is missing.
pub(super) fn next(facts: &Facts) -> Next {
    if !facts.something_missing() {
        return Next::Done;
    }
    // Steps of rustup need no privileges.
    if facts.rustup.is_some() && !facts.components_missing.is_empty() {
        let step = Step::Components(facts.components_missing.clone());
        if !facts.tried.contains(&step) {
            return Next::Step(step);
        }
    }
    if let (Some(_), Some(Cross { target, standard_library: false, .. })) = (facts.rustup, &facts.cross) {
        let step = Step::StandardLibrary(target.triple);
        if !facts.tried.contains(&step) {
            return Next::Step(step);
        }
    }
    if facts.toolchain.is_none() && facts.named.is_none() {
        let step = match facts.rustup {
            Some(true) => Some(Step::NightlySources),
            Some(false) => Some(Step::Nightly),
            None => None,
        };
        if let Some(step) = step.filter(|step| !facts.tried.contains(step)) {
            return Next::Step(step);
        }
    }
    let Some(apt) = &facts.apt else { return by_hand(facts) };
    if !facts.root_or_sudo {
        return by_hand(facts);
    }
    if !facts.tried.contains(&Step::AptUpdate) {
        return Next::Step(Step::AptUpdate);
    }
    let mut packages: Vec<String> = facts.programs_missing.iter().map(|name| (*name).to_owned()).collect();
    if let Some(Cross { target, compiler: false, .. }) = &facts.cross {
        packages.extend(target.packages.map(str::to_owned));
    }
    match &facts.toolchain {
        None if facts.named.is_none() => match &apt.compiler {
            Some(compiler) => packages.extend(compiler.packages.iter().cloned()),
            None => return by_hand(facts),
        },
        None => return by_hand(facts),
        Some(toolchain) if !facts.linker_fits(toolchain) => {
            let llvm = toolchain.llvm;
            if !LINKER_LLVM.contains(&llvm) || !apt.llvm {
                return by_hand(facts);
            }
            packages.extend(libraries(llvm));
        }
        Some(_) => {}
    }
    if !packages.is_empty() {
        let step = Step::AptInstall(packages);
        if !facts.tried.contains(&step) {
            return Next::Step(step);
        }
    }
    if let Some(toolchain) = &facts.toolchain
        && !facts.linker_fits(toolchain)
    {
        let step = Step::Linker(toolchain.llvm);
        if !facts.tried.contains(&step) {
            return Next::Step(step);
        }
    }
    by_hand(facts)
}

/// Returns the packages against which bpf-linker is compiled.
fn libraries(llvm: u32) -> Vec<String> {
    let of_llvm = [format!("llvm-{llvm}-dev"), format!("libpolly-{llvm}-dev")];
    let others = ["zlib1g-dev", "libzstd-dev", "libxml2-dev"].map(str::to_owned);
    of_llvm.into_iter().chain(others).collect()
}

/// Describes what the user has to do.
fn by_hand(facts: &Facts) -> Next {
    let mut lines = vec!["setup cannot finish by itself on this machine. What is missing:".to_owned()];
    let (major, minor) = OLDEST_RUSTC;
    match (&facts.toolchain, &facts.named) {
        (None, Some(named)) => lines.push(format!(
            "- {VARIABLE} names {named}, which is not a toolchain with rust-src, or not one that `rustup run` finds"
        )),
        (None, None) => lines.push(format!(
            "- a rustc of {major}.{minor} or newer with rust-src: `rustup toolchain install nightly --component rust-src`, or the distribution's packages (Debian 12: rustc-web cargo-web rust-web-src)"
        )),
        (Some(toolchain), _) if !facts.linker_fits(toolchain) => lines.push(linker_by_hand(toolchain)),
        (Some(_), _) => {}
    }
    for program in &facts.programs_missing {
        lines.push(format!("- the program {program} (package {program})"));
    }
    for component in &facts.components_missing {
        let component = if *component == "fmt" { "rustfmt" } else { component };
        lines.push(format!("- {component}: `rustup component add {component}`"));
    }
    if let Some(Cross { target, standard_library, compiler }) = &facts.cross {
        let (triple, [gcc, libc]) = (target.triple, target.packages);
        if !standard_library {
            let debian = target.debian;
            lines.push(format!(
                "- the standard library of {triple}: `rustup target add {triple}`, or for a compiler of the distribution its libstd-rust-dev:{debian} (after `dpkg --add-architecture {debian}`)"
            ));
        }
        if !compiler {
            lines.push(format!(
                "- a C compiler for {triple} with its C library (Debian: {gcc} {libc}), or one named by {} and CC_{}",
                target.linker_variable(),
                triple.replace('-', "_")
            ));
        }
    }
    if facts.apt.is_some() && !facts.root_or_sudo {
        lines.push("Packages could be installed as root, or with sudo.".to_owned());
    }
    Next::Impossible(lines.join("\n"))
}

fn linker_by_hand(toolchain: &Toolchain) -> String {
    let llvm = toolchain.llvm;
    if !LINKER_LLVM.contains(&llvm) {
        let (first, last) = (LINKER_LLVM.start(), LINKER_LLVM.end());
        return format!(
            "- a toolchain whose LLVM bpf-linker {LINKER} knows ({first} to {last}): {} has {llvm}; {VARIABLE} chooses another",
            toolchain.name
        );
    }
    format!(
        "- bpf-linker for LLVM {llvm}: install LLVM {llvm} with its headers (Debian: {}), then\n  LLVM_PREFIX=/usr/lib/llvm-{llvm} cargo install bpf-linker --version {LINKER} --locked --no-default-features --features llvm-{llvm}",
        libraries(llvm).join(" ")
    )
}

#[cfg(test)]
mod tests;
