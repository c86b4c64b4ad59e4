//! Packages of Debian and Ubuntu: look-up and installation.

use std::process::Command;

use crate::cargo;

/// The oldest rustc that compiles the packet path.
pub(super) const OLDEST_RUSTC: (u32, u32) = (1, 91);

/// The names of packages that together make a BPF toolchain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Compiler {
    pub(super) packages: [String; 3],
    pub(super) version: (u32, u32),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Apt {
    /// The newest compiler, with its sources, that is recent enough.
    pub(super) compiler: Option<Compiler>,
    /// Whether the libraries are available against which bpf-linker for the found toolchain is
    /// compiled.
    pub(super) llvm: bool,
}

impl Apt {
    /// Reads the package lists of apt on this machine; `None` without apt. `llvm` is the version of
    /// the toolchain's LLVM, if there is one.
    pub(super) fn look(llvm: Option<u32>) -> Option<Self> {
        cargo::find("apt-get")?;
        let names = cargo::output(Command::new("apt-cache").args(["pkgnames", "rustc"])).unwrap_or_default();
        let compiler = compilers(&names)
            .into_iter()
            .filter_map(|packages| {
                let version = candidate(&packages[0])?;
                candidate(&packages[2])?;
                (version >= OLDEST_RUSTC).then_some(Compiler { packages, version })
            })
            .max_by_key(|compiler| compiler.version);
        let llvm = llvm.is_some_and(|major| candidate(&format!("llvm-{major}-dev")).is_some());
        Some(Self { compiler, llvm })
    }
}

/// Returns the packages under the names in use: `rustc` (Debian, Ubuntu), `rustc-web` (Debian's own
/// for browsers, newer than its release), `rustc-1.91` (Ubuntu).
fn compilers(names: &str) -> Vec<[String; 3]> {
    names
        .lines()
        .filter_map(|name| {
            let suffix = name.strip_prefix("rustc")?;
            let source = match suffix {
                "" => "rust-src".to_owned(),
                "-web" => "rust-web-src".to_owned(),
                _ if version(suffix.strip_prefix('-')?).is_some() => format!("rust{suffix}-src"),
                _ => return None,
            };
            Some([name.to_owned(), format!("cargo{suffix}"), source])
        })
        .collect()
}

fn candidate(package: &str) -> Option<(u32, u32)> {
    let policy = cargo::output(Command::new("apt-cache").args(["policy", package]).env("LC_ALL", "C"))?;
    let line = policy.lines().find_map(|line| line.trim().strip_prefix("Candidate: "))?;
    version(line)
}

/// Returns the first two numbers of a version, without the epoch before a colon.
fn version(text: &str) -> Option<(u32, u32)> {
    let text = text.split_once(':').map_or(text, |(_, rest)| rest);
    let mut numbers = text.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compilers_by_name() {
        let found = compilers("rustc\nrustc-web\nrustc-1.91\nrustc-mozilla-doc\nrustc-doc\n");
        let names: Vec<String> = found.iter().map(|packages| packages.join(" ")).collect();
        assert_eq!(
            names,
            [
                "rustc cargo rust-src",
                "rustc-web cargo-web rust-web-src",
                "rustc-1.91 cargo-1.91 rust-1.91-src"
            ]
        );
    }

    #[test]
    fn versions() {
        assert_eq!(version("1.96.0+dfsg1-1~deb12u2"), Some((1, 96)));
        assert_eq!(version("1:22.1.8-1~deb12u1"), Some((22, 1)));
        assert_eq!(version("(none)"), None);
    }
}
